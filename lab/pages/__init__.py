"""Pages of docs/ that code writes: one module a page, printed by `python -m lab.pages.NAME`."""
