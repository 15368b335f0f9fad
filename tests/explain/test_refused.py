"""What the translators refuse is told by the user's own keys: the cases of refused.yaml."""

from pathlib import Path

import pytest
import yaml

from mis_plugins.errors import ConfigError
from mis_plugins.explain.translate import areal, ms_swift, prime_rl, trl, verl

TRANSLATE = {
    "verl": verl.translate,
    "ms-swift": ms_swift.translate,
    "AReaL": areal.translate,
    "TRL": trl.translate,
    "prime-rl": prime_rl.translate,
}
REFUSED = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text())
CASES = [(framework, case) for framework in REFUSED for case in REFUSED[framework]]


@pytest.mark.parametrize(("framework", "case"), CASES, ids=lambda value: str(value)[:60])
def test_what_cannot_be_translated_is_refused(framework: str, case: dict) -> None:
    said = case["said"] if isinstance(case["said"], str) else yaml.safe_dump(case["said"])
    with pytest.raises(ConfigError, match=case["told"]):
        TRANSLATE[framework](said, case.get("behind", ())).text()
