"""How annotations are checked while the tests run: `pytest --jaxtyping-packages mis_plugins,shapes.checked`."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is good where a float is asked for
