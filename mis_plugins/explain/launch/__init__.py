"""Launch scripts of Miles, slime and vime: which hooks, config and flags a script gives to train.py, and what it lacks.

Scripts are read and never executed. `python` reads launchers in Python and `bash` those in shell, both with the
branches of `reader` and into `words`; `judgement` says what would load, and `command` which lines to write. A branch
whose condition is not known is read both ways, and what only one way gives is marked with the condition.
"""
