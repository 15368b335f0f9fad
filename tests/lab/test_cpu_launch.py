"""A launch of a host on a CPU: what the check makes of our layers, of the environment and of each flag."""

from argparse import Namespace
from typing import Any

import pytest

from lab.in_host import cpu_launch as cpu
from true_on_policy.contract.cpu import Contract
from true_on_policy.engines.handover import CONTRACT, ORDER
from true_on_policy.errors import ContractError

CONTRACTS = (
    Contract(),
    Contract(dtype="bf16", norm_order="trainer"),
    Contract(dtype="bf16", trainer_tensor_parallel=2, leaves=4),
)
each = pytest.mark.parametrize("contract", CONTRACTS)


def parsed(contract: Contract, **changes: Any) -> Namespace:
    """The arguments of a host that parsed the flags of a launch."""
    return Namespace(**{flag.attribute: flag.value for flag in cpu.launch_flags(contract)} | changes)


def refused(contract: Contract, environment: dict[str, str], **changes: Any) -> str:
    with pytest.raises(ContractError) as raised:
        cpu.check(parsed(contract, **changes), environment)
    return str(raised.value)


@pytest.fixture(autouse=True)
def plugged_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_installed", lambda group: True)


@each
def test_a_launch_gives_the_contract_that_the_environment_states(contract: Contract) -> None:
    assert cpu.check(parsed(contract), cpu.environment_of(contract)) == contract


ON_FSDP = Contract(dtype="bf16", norm_order="trainer")


def test_a_launch_on_fsdp_is_told_by_its_environment() -> None:
    flags = {flag.attribute: flag.value for flag in cpu.launch_flags(ON_FSDP, cpu.FSDP)}
    environment = cpu.environment_of(ON_FSDP, cpu.FSDP)
    assert cpu.check(Namespace(**flags), environment) == ON_FSDP
    assert environment[ORDER] != cpu.environment_of(ON_FSDP)[ORDER], "Hugging Face rounds otherwise than Megatron"
    flags["attn_implementation"] = "eager"
    with pytest.raises(ContractError, match="launch with --attn-implementation sdpa"):
        cpu.check(Namespace(**flags), environment)
    with pytest.raises(ContractError, match="trainer_tensor_parallel: 2 on FSDP"):
        cpu.launch_flags(CONTRACTS[2], cpu.FSDP)


@each
def test_each_flag_that_was_not_parsed_is_named(contract: Contract) -> None:
    for flag in cpu.launch_flags(contract):
        if flag.attribute != "spec":
            told = refused(contract, cpu.environment_of(contract), **{flag.attribute: "other"})
            assert f"{flag.attribute} is 'other'; launch with {' '.join(flag.words)}" in told


def test_every_refusal_is_told() -> None:
    for rule in cpu.REFUSALS:
        told = refused(CONTRACTS[0], cpu.environment_of(CONTRACTS[0]), **{rule.attribute: "other"})
        assert f"{rule.attribute} is 'other': {rule.why}" in told


def test_the_contract_the_order_and_the_compiler_are_of_the_environment() -> None:
    assert f"where {CONTRACT} is unset" in refused(CONTRACTS[0], {})
    given = cpu.environment_of(CONTRACTS[1])
    told = refused(CONTRACTS[1], {CONTRACT: given[CONTRACT]})
    assert f"{ORDER} is None" in told and "TORCH_COMPILE_DISABLE=1" in told
    other = cpu.environment_of(CONTRACTS[0]) | {ORDER: given[ORDER]}
    assert f"{ORDER} is '{given[ORDER]}' in the environment; start Ray's job without it" in refused(CONTRACTS[0], other)


def test_an_engine_without_our_entry_points_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_installed", lambda group: group != "sglang.srt.platforms")
    told = refused(CONTRACTS[0], cpu.environment_of(CONTRACTS[0]))
    assert "no entry point true_on_policy in the group sglang.srt.platforms" in told
