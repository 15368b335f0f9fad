"""Trainers compute the log-prob of every token of given sequences, behind one small protocol."""
