"""What Miles alone does, as read in Miles 31f1ca9."""
