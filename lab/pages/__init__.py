"""Pages under docs/, made from records: `python -m lab.pages.NAME` writes one; the build fails where one is stale."""
