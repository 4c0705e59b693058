"""Pages for browsers. One so far: a door plate that says what runs here and how to use it."""
