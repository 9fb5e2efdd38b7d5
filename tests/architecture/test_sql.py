"""Named SQL and the Python that calls it fit together, and states move only as the table says."""

import ast
import re
from collections import Counter
from functools import cache

import pytest
from fencepost_server.domain.run import TRANSITIONS, RunState, allowed
from fencepost_server.store.statements import load

from tests.architecture.sources import MIGRATIONS, SQL_FILES, Block, Use, blocks, modules, uses

# Where a state as a parameter costs most.
_HOT = {"firing", "claims", "leases", "outcomes", "settle", "enqueue"}


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
    [block for block in blocks() if block.changes_states],
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
    assert carried == {transition.event for transition in TRANSITIONS}


def test_claims_in_the_schema_move_runs_as_the_claims_in_files_do() -> None:
    text = "\n".join(path.read_text() for path in MIGRATIONS)
    # The newest definition is the one that is called.
    function = text[text.rindex("FUNCTION fencepost.claim_capped_runs") :]
    body = function[: function.index("END $$;")]
    assert re.findall(r"SET state = '(\w+)'", body) == ["running"]
    assert set(re.findall(r"state IN \(([^)]*)\)", body)) == {"'queued', 'retrying'"}
    # Whatever was found before, a row is claimed only in one of these states.
    held = body[body.index("), held AS MATERIALIZED (") : body.index("), claimed AS (")]
    assert "WHERE q.state IN ('queued', 'retrying')" in held


def test_functions_that_make_runs_move_them_as_their_call_says() -> None:
    text = next(path for path in MIGRATIONS if path.stem == "0005_enqueue").read_text()
    made = re.search(r"CREATE FUNCTION fencepost\.insert_enqueued.*?END \$\$;", text, re.DOTALL)
    replaced = re.search(r"CREATE FUNCTION fencepost\.replace_waiting.*?END \$\$;", text, re.DOTALL)
    assert made is not None
    assert replaced is not None
    states = "|".join(state.name.lower() for state in RunState)
    assert re.findall(rf"'({states})'", made[0]) == ["queued"]
    assert re.findall(rf"'({states})'", replaced[0]) == ["queued", "cancelled", "cancelled"]
    writers = re.findall(r"(?:INSERT INTO|DELETE FROM|UPDATE) fencepost\.run_queue", text)
    # Made; taken away for another; taken back from the key of an ended run.
    assert len(writers) == 3


@pytest.mark.parametrize("block", [b for b in blocks() if b.file in _HOT], ids=_named)
def test_states_of_live_runs_are_literals_in_conditions(block: Block) -> None:
    """With a parameter the generic plan could not use the partial indexes."""
    assert not re.search(r"\bq\.state\s*(=|<>|IN|= ANY)\s*\(?@", block.sql)


@pytest.mark.parametrize("block", [b for b in blocks() if b.moves], ids=_named)
def test_a_statement_that_moves_runs_tells_their_watchers(block: Block) -> None:
    """Itself, or through the functions of the schema that it calls."""
    assert _TOLD in _with_functions(block.sql)


def test_functions_of_the_schema_that_move_runs_tell_their_watchers() -> None:
    moves = re.compile(r"(?:INSERT INTO|UPDATE|DELETE FROM) fencepost\.run_queue")
    moving = {name for name, text in _functions().items() if moves.search(text)}
    assert "claim_capped_runs" in moving
    assert {name for name in moving if _TOLD not in _with_functions(_functions()[name])} == set()


_TOLD = "INSERT INTO fencepost.run_changes"


@cache
def _functions() -> dict[str, str]:
    """The newest definition of every function of the schema."""
    text = "\n".join(path.read_text() for path in MIGRATIONS)
    definition = re.compile(
        r"CREATE (?:OR REPLACE )?FUNCTION fencepost\.(\w+)\(.*?\bAS\s*(\$\$|')(.*?)\2", re.DOTALL
    )
    return {match[1]: match[3] for match in definition.finditer(text)}


def _with_functions(sql: str) -> str:
    """With the text of the functions it calls, and of those that they call."""
    texts, seen = [sql], set[str]()
    for text in texts:
        for name in re.findall(r"fencepost\.(\w+)\(", text):
            if name in _functions() and name not in seen:
                seen.add(name)
                texts.append(_functions()[name])
    return "\n".join(texts)


def test_a_run_enqueued_alone_is_made_queued_or_running_and_nothing_else() -> None:
    text = "\n".join(path.read_text() for path in MIGRATIONS)
    function = text[text.rindex("FUNCTION fencepost.enqueue_run(") :]
    body = function[: function.index("END $$;")]
    assert re.findall(r"THEN '(\w+)' ELSE '(\w+)' END::fencepost\.run_state", body) == [
        ("running", "queued")
    ]
    writers = re.findall(r"(?:INSERT INTO|DELETE FROM|UPDATE) fencepost\.(\w+)", body)
    assert writers == ["run_keys", "run_queue", "run_changes", "requests"]
