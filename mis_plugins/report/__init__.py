"""See the mismatch of a run that is over, or still runs, from the files that it left behind."""
