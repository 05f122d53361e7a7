"""``fxpipe explore``: a page of HTML, by itself, on which one looks at the library's schedules."""
