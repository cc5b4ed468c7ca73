#!/usr/bin/env bash
# Create a virtual environment and install gshard into it, once.
#
#   scripts/venv.sh DIR EXTRAS
#
# DIR is created when it is missing. gshard is installed from this checkout with the given extras
# (comma-separated, as in `pip install -e '.[test,plot]'`). A stamp in DIR for each extra remembers
# what was installed: the next call does nothing until pyproject.toml or the version changes.
#
#   PYTHON=...   the Python to create it with (default: the first of python3.11, 3.12, 3.13, python3
#                that works)
#   UPGRADE=1    bring every package to its newest version
set -euo pipefail
cd "$(dirname "$0")/.."

dir=${1%/}
extras=$2
IFS=, read -ra stamps <<<"$extras"
stamps=("${stamps[@]/#/$dir/.gshard-installed-}")

say() { printf '== %s\n' "$*"; }
die() { printf '%s\n' "$@" >&2; exit 1; }

# 0: Python >= 3.11 with the venv module; 1: not a Python, or too old; 3: no venv module
check_python() {
    command -v "$1" >/dev/null 2>&1 || return 1
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || return 1
    "$1" -c 'import venv, ensurepip' >/dev/null 2>&1 || return 3
}

version_of() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null; }

find_python() {
    local candidate rc without_venv= candidates=(python3.11 python3.12 python3.13 python3)
    if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        rc=0
        check_python "$candidate" || rc=$?
        if [ "$rc" = 0 ]; then
            python=$candidate
            return
        fi
        if [ "$rc" = 3 ] && [ -z "$without_venv" ]; then without_venv=$candidate; fi
    done
    if [ -n "$without_venv" ]; then
        local minor
        minor=$("$without_venv" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        die "gshard: Python $(version_of "$without_venv") is here, but its venv module is not." \
            "  Debian, Ubuntu:  sudo apt install python$minor-venv   (or python3-venv)" \
            "  Then run the same command again."
    fi
    if [ -n "${PYTHON:-}" ]; then
        die "gshard: PYTHON=$PYTHON is not a Python of version 3.11 or newer."
    fi
    die "gshard needs Python 3.11 or newer; python3 here is $(version_of python3 || echo missing)." \
        "  Debian, Ubuntu:  sudo apt install python3 python3-venv" \
        "  Or name one:     make PYTHON=/path/to/python3.11 ..."
}

# Everything that decides what must be installed.
fingerprint() {
    cksum pyproject.toml gshard/_util/version.py
    "$dir/bin/python" -c 'import os, sys; print(sys.version, os.path.realpath(sys.prefix))' 2>/dev/null
}

has_pip() { "$dir/bin/python" -m pip --version >/dev/null 2>&1; }

runs() { "$dir/bin/python" -c 'import sys' >/dev/null 2>&1; }

# Whether it runs where it was made: the scripts in bin/ name that path, as the stamps do.
works() {
    runs || return 1
    local prefix
    prefix=$("$dir/bin/python" -c 'import os, sys; print(os.path.realpath(sys.prefix))')
    [ -z "$(grep -LF -- " $prefix" "$dir"/.gshard-installed-* 2>/dev/null)" ]
}

ready() {
    local stamp now
    [ -z "${UPGRADE:-}" ] && now=$(fingerprint) || return 1
    for stamp in "${stamps[@]}"; do
        [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$now" ] || return 1
    done
}

build_of() { "$1" -c 'import sys; print(sys.version)' 2>/dev/null; }

if [ -n "${PYTHON:-}" ] && works && [ "$(build_of "$PYTHON")" != "$(build_of "$dir/bin/python")" ]; then
    say "PYTHON=$PYTHON is not used: $dir has Python $(version_of "$dir/bin/python"). To create it again: rm -rf $dir"
fi

if ready; then exit 0; fi

# One call at a time, as of `make` in two terminals. The system frees the lock of a process that ends.
if works; then python=$dir/bin/python; else find_python; fi
mkdir -p "$(dirname "$dir")"
if ! { exec 9>"$dir-lock"; } 2>/dev/null || ! "$python" -c 'import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("== waiting for another make, which installs into", sys.argv[1], flush=True)
    fcntl.flock(9, fcntl.LOCK_EX)' "$dir"; then
    say "$dir-lock cannot be locked: run one make at a time"
fi
if ready; then exit 0; fi

if ! works; then
    if [ -e "$dir" ] && [ ! -e "$dir/pyvenv.cfg" ]; then
        die "gshard: $dir exists and is not a virtual environment; move it away."
    fi
    find_python  # before anything is deleted
    if runs; then
        say "$dir was created at another path; creating it again"
    elif [ -e "$dir" ]; then
        say "$dir does not work any more; creating it again"
    fi
    rm -rf "$dir"
    size=" (some 700 MB, about a minute)"
    say "creating $dir with Python $(version_of "$python") ($(command -v "$python"))"
    "$python" -m venv "$dir" || { rm -rf "$dir"; die "gshard: $python -m venv $dir failed, see above."; }
fi

# An environment of `uv venv` has none.
if ! has_pip && ! { "$dir/bin/python" -m ensurepip && has_pip; }; then
    die "gshard: $dir has no pip that works, and Python cannot install one." \
        "  Install it with uv:       uv pip install --python $dir pip" \
        "  Or create $dir again:     rm -rf $dir" \
        "  Then run the same command again."
fi

say "installing gshard and its extras [$extras] into $dir${size:-}"
"$dir/bin/python" -m pip install --disable-pip-version-check --no-compile \
    ${UPGRADE:+--upgrade --upgrade-strategy eager} --editable ".[$extras]" </dev/null
# On all cores, where pip compiles on one. Some packages have files that are no Python of this version.
"$dir/bin/python" -m compileall -q -j 0 "$dir/lib" >/dev/null 2>&1 || true
for stamp in "${stamps[@]}"; do
    fingerprint > "$dir/.new-stamp"
    mv "$dir/.new-stamp" "$stamp"  # whole or not at all: half a stamp is that of another environment
done
say "$dir is ready"
