"""A forecast as one page of HTML: `page` has its sections, `markup` its elements."""
