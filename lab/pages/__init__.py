"""Pages of docs/ that code writes: one module a page, printed or written by `python -m lab.pages.NAME`."""
