"""What both packages need: strangers' files, the terminal, commits, numbers of a command line."""
