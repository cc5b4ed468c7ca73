"""A forecast as one page of HTML."""
