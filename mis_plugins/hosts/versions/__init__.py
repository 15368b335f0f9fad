"""Fully asynchronous hosts: the version of every token, from the engine to the loss hook, and log pi_{v+1} of it."""
