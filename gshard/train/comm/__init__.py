"""Every collective of the core, buckets, and the reduction of gradients."""
