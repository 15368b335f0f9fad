"""What both packages need: whole files, tables, progress, commits, warnings."""
