"""Fully asynchronous hosts: carry each token's version v to the loss hook, and score log pi_{v+1}."""
