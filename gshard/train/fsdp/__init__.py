"""Parameters all-gathered at their first use and re-gathered in the backward pass."""
