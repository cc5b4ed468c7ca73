"""A forecast as one page of HTML: `page` is the page, the other modules are its sections."""
