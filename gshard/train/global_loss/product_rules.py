"""Rules of contractions, convolutions, windows, matrix decompositions and random keys."""

from __future__ import annotations

from gshard.train.global_loss.halo import convolution_over_positions
from gshard.train.global_loss.placement import PARTIAL, REPLICATED, agree, first_sharded
from gshard.train.global_loss.registry import Decision, Given, rule

THREEFRY_KEY = "key<fry>"


@rule("dot_general")
def dot_general(given: Given) -> Decision | None:
    """Batch and free dimensions stay sharded; contracted ones give a partial sum."""
    contracted, batch = given.params["dimension_numbers"]
    side = 0 if given.placements[0].is_sharded else 1
    place, other = given.placements[side], given.placements[1 - side]
    wanted = list(given.placements)
    for pairs in (contracted, batch):
        if place.dim in pairs[side]:
            i = pairs[side].index(place.dim)
            wanted[1 - side] = place.on(pairs[1 - side][i])
            if other not in (REPLICATED, wanted[1 - side]):
                return None
            return Decision(wanted, [PARTIAL if pairs is contracted else place.on(i)])
    if other != REPLICATED:
        return None
    free = [
        [d for d in range(len(shape)) if d not in contracted[s] and d not in batch[s]]
        for s, shape in enumerate(given.shapes)
    ]
    first = len(batch[0]) + (len(free[0]) if side else 0)
    return Decision(wanted, [place.on(first + free[side].index(place.dim))])


@rule("conv_general_dilated")
def convolution(given: Given) -> Decision | None:
    """The batch stays sharded; a contraction over examples, in a gradient, is a partial sum.

    Over positions that are sharded, devices exchange those that the kernel reaches.
    """
    numbers, place = given.params["dimension_numbers"], first_sharded(given.placements)
    if given.params["batch_group_count"] != 1:
        return None
    if given.placements == [place, REPLICATED] and place.dim == numbers.lhs_spec[0]:
        return Decision(given.placements, [place.on(numbers.out_spec[0])])
    over_positions = convolution_over_positions(given)
    if over_positions is not None:
        return over_positions
    features = [place.on(numbers.lhs_spec[1]), place.on(numbers.rhs_spec[1])]
    grouped = given.params["feature_group_count"] != 1
    return None if grouped or given.placements != features else Decision(features, [PARTIAL])


_WINDOWS = "reduce_window reduce_window_sum reduce_window_max reduce_window_min"


@rule(*_WINDOWS.split(), "select_and_scatter_add", "select_and_gather_add")
def windows(given: Given) -> Decision | None:
    """Windows that contain one example."""
    place, params = first_sharded(given.placements), given.params
    dim = place.dim
    ones = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    if any(params.get(n) is not None and params[n][dim] != 1 for n in ones):
        return None
    if tuple(params["padding"][dim]) != (0, 0) or not agree(given.placements, place):
        return None
    wanted = [place if shape else REPLICATED for shape in given.shapes]
    return Decision(wanted, [place] * len(given.eqn.outvars))


@rule("cholesky", "lu", "qr", "svd", "eigh", "triangular_solve", "householder_product")
def matrices(given: Given) -> Decision | None:
    """Stacks of matrices, of which the last two dimensions are one."""
    place = first_sharded(given.placements)
    if given.eqn.primitive.name == "triangular_solve" and not given.placements[0].is_sharded:
        # Columns of b (rows, with left_side=False) are solved independently.
        own = len(given.shapes[1]) - (1 if given.params["left_side"] else 2)
        if place.dim == own:
            return Decision([REPLICATED, place], [place])
    if not agree(given.placements, place) or any(place.dim >= len(s) - 2 for s in given.shapes):
        return None
    size = given.shapes[0][place.dim]
    results = [v.aval.shape for v in given.eqn.outvars]
    if any(len(shape) <= place.dim or shape[place.dim] != size for shape in results):
        return None
    return given.all(place)


@rule("fft")
def fourier(given: Given) -> Decision | None:
    """Along the last dimensions."""
    place, last = given.placements[0], len(given.params["fft_lengths"])
    return given.all(place) if place.dim < len(given.shapes[0]) - last else None


@rule("random_wrap", "random_unwrap", "random_split", "random_bits")
def keys(given: Given) -> Decision | None:
    """Arrays of keys; the words of one key stay together."""
    place, name = given.placements[0], given.eqn.primitive.name
    if name == "random_wrap" and place.dim == len(given.shapes[0]) - 1:
        return None
    # Other generators draw for an array of keys from its first one.
    alone = str(given.eqn.invars[0].aval.dtype) == THREEFRY_KEY
    return None if name in ("random_split", "random_bits") and not alone else given.all(place)


@rule("random_gamma")
def gamma(given: Given) -> Decision | None:
    """Each key is split into as many as it draws numbers: whole keys stay sharded."""
    place = first_sharded(given.placements)
    keys, own = len(given.shapes[0]), str(given.eqn.invars[0].aval.dtype) == THREEFRY_KEY
    if not own or place.dim >= keys or not agree(given.placements, place):
        return None
    return given.all(place)
