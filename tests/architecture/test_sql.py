"""Named SQL and the Python that calls it fit together, and states move only as the table says."""

import ast
import re
from collections import Counter
from functools import cache

import pytest
from fencepost_server.domain.run import TRANSITIONS, RunState, allowed
from fencepost_server.store.statements import load

from tests.architecture.sources import MIGRATIONS, SQL_FILES, Block, Use, blocks, modules, uses

# Takes runs back that the same transaction has made under keys of ended ones.
_UNDOES = {"withdraw_enqueued"}
# Where a state as a parameter costs most.
_HOT = {"firing", "claims", "leases", "outcomes", "settle", "enqueue"}
# Belong to what a later version serves.
_EVENTS_TO_COME = {"replay"}


def _named(block: Block) -> str:
    return f"{block.file}.{block.name}"


def _located(use: Use) -> str:
    return f"{use.path.name}:{use.line}:{use.name}"


def test_the_sources_are_found() -> None:
    assert len(SQL_FILES) >= 10
    assert len(blocks()) >= 80
    assert len(uses()) >= 80


def test_names_are_unique_over_all_files() -> None:
    counts = Counter(block.name for block in blocks())
    assert {name for name, count in counts.items() if count > 1} == set()


@pytest.mark.parametrize("block", blocks(), ids=_named)
def test_every_statement_is_used(block: Block) -> None:
    assert block.name in _strings(), "no Python names it"


@cache
def _strings() -> frozenset[str]:
    return frozenset(
        node.value
        for _, module in modules()
        for node in ast.walk(module)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


@pytest.mark.parametrize("use", uses(), ids=_located)
def test_every_use_names_a_statement_and_gives_its_parameters(use: Use) -> None:
    statements = load(use.file)
    assert use.name in statements
    if use.values is not None:
        assert use.values == set(statements[use.name].parameters)


def test_most_uses_spell_their_parameters_out() -> None:
    spelled = sum(use.values is not None for use in uses())
    assert spelled > 0.7 * len(uses())


@pytest.mark.parametrize(
    "block",
    [block for block in blocks() if block.changes_states and block.name not in _UNDOES],
    ids=_named,
)
def test_a_statement_that_changes_states_says_which_transitions_it_carries_out(
    block: Block,
) -> None:
    assert block.moves, "it has no `-- Moves:` line"
    spelled = block.state_literals
    named = {state for moves in block.moves for state in moves.sources | moves.targets}
    assert spelled <= named, "it names states that its Moves lines do not"


@pytest.mark.parametrize("block", [b for b in blocks() if b.moves], ids=_named)
def test_the_moves_of_a_statement_are_in_the_table_of_transitions(block: Block) -> None:
    for moves in block.moves:
        [transition] = [t for t in TRANSITIONS if t.event == moves.event]
        assert moves.rows <= set(transition.rows.split())
        assert moves.sources <= {state.name.lower() for state in transition.sources}
        assert moves.targets <= {state.name.lower() for state in transition.targets}
        for source in moves.sources:
            for target in moves.targets:
                assert allowed(RunState.of(source), RunState.of(target))


def test_every_transition_is_carried_out_by_some_statement() -> None:
    carried = {moves.event for block in blocks() for moves in block.moves}
    assert carried | _EVENTS_TO_COME == {transition.event for transition in TRANSITIONS}


def test_claims_in_the_schema_move_runs_as_the_claims_in_files_do() -> None:
    text = "\n".join(path.read_text() for path in MIGRATIONS)
    function = text[text.index("CREATE FUNCTION fencepost.claim_capped_runs") :]
    body = function[: function.index("END $$;")]
    assert re.findall(r"SET state = '(\w+)'", body) == ["running"]
    assert re.findall(r"state IN \(([^)]*)\)", body) == ["'queued', 'retrying'"]


@pytest.mark.parametrize("block", [b for b in blocks() if b.file in _HOT], ids=_named)
def test_states_of_live_runs_are_literals_in_conditions(block: Block) -> None:
    """With a parameter the generic plan could not use the partial indexes."""
    assert not re.search(r"\bq\.state\s*(=|<>|IN|= ANY)\s*\(?@", block.sql)
