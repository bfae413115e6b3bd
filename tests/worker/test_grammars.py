"""Outputs that follow grammars, under the real scheduler: valid, and the same however it is cut."""

import random
import re
import time
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
import torch
from history_serving import VOCAB_SIZE, Serving, history_logits
from random_schemas import random_schema

from cearx.core.events import FinishReason
from cearx.core.grammar import GrammarCompiler, GrammarError, pack_vocabulary
from cearx.core.identifiers import RequestId
from cearx.core.messages import PrepareGrammar, SamplingParams, Vocabulary
from cearx.frontend.structured_output import (
    choice_constraint,
    grammar_constraint,
    json_constraint,
    regex_constraint,
)
from cearx.worker.grammar_table import MAX_GRAMMARS, GrammarTable
from cearx.worker.request_states import RequestState
from cearx.worker.sampler import Sampler
from cearx.worker.sampling_rule import SamplingRule

EOS, OTHER_EOS = ENDS = 95, 96
TOKENS = [bytes([32 + i]) for i in range(94)] + ["ü".encode(), b"</s>", b"<|end|>"]
"""ASCII from the space on without ~, one letter of two bytes, and two ends."""
SEED = 11


def vocabulary() -> Vocabulary:
    return pack_vocabulary(TOKENS, [EOS, OTHER_EOS], [EOS, OTHER_EOS])


def prepare(table: GrammarTable, *grammars: str) -> dict[int, str | None]:
    """Has a table compile grammars; answers the errors by index."""
    table.take(vocabulary())
    for key, grammar in enumerate(grammars):
        table.take(PrepareGrammar(key=key, grammar=grammar))
    errors: dict[int, str | None] = {}
    give_up = time.monotonic() + 20
    while len(errors) < len(grammars) and time.monotonic() < give_up:
        errors |= {prepared.key: prepared.error for prepared in table.finished()}
        time.sleep(0.001)
    return errors


def text_of(token_ids: list[int]) -> str:
    return b"".join(TOKENS[i] for i in token_ids if i < EOS).decode()


def schema_grammar(schema: Any) -> str:
    return json_constraint("schema", schema).grammar


GRAMMARS: list[tuple[str, Any]] = [
    (regex_constraint("r", r"[a-c]{2,5}x|foo\d*!").grammar, re.compile(r"[a-c]{2,5}x|foo[0-9]*!")),
    (regex_constraint("r", "ü{1,9}").grammar, re.compile("ü{1,9}")),
    (choice_constraint("c", ["yes", "no", 'say "hi"\\']).grammar,
     re.compile(re.escape("yes") + "|no|" + re.escape('say "hi"\\'))),
    (grammar_constraint("g", 'root ::= "(" root ")" | "x"').grammar, None),
    (grammar_constraint("g", 'start: "a" b+\nb: "b" | "c"').grammar, re.compile("a[bc]+")),
    (schema_grammar({"type": "array", "items": {"enum": [1, 22]}, "maxItems": 3}), None),
]  # fmt: skip
RULES = [
    SamplingParams(temperature=0, eos_token_ids=ENDS),
    SamplingParams(seed=SEED, temperature=1.5, eos_token_ids=ENDS, num_logprobs=1),
    SamplingParams(seed=SEED, top_p=0.9, top_k=40, eos_token_ids=ENDS, repetition_penalty=1.1),
    SamplingParams(seed=3, eos_token_ids=ENDS, min_tokens=4),
]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("num_blocks", "budget", "caching"), [(200, 512, True), (22, 20, True), (22, 32, False)]
)
def test_answers_follow_their_grammars(
    num_blocks: int, budget: int, caching: bool, depth: int
) -> None:
    """Every finished answer is a text of its grammar, alone, in batches and after preemptions.

    The tokens are those of a roomy pool without chunks, so a matcher that lost or repeated a token
    would show. Others without grammars run beside them.
    """
    tokens = run_all(num_blocks, budget, caching, depth)
    assert tokens == run_all(400, 512, False, 1)


def run_all(num_blocks: int, budget: int, caching: bool, depth: int) -> dict[int, list[int]]:
    serving = Serving(num_blocks, 4, budget, 8, caching, depth)
    prepare(serving.states.grammars, *(grammar for grammar, _ in GRAMMARS))
    rng = np.random.default_rng(1)
    cases = [(grammar, rule) for grammar in (*GRAMMARS, (None, None)) for rule in RULES]
    for key, ((grammar, _), rule) in enumerate(cases):
        prompt = rng.integers(0, 95, int(rng.integers(1, 18))).tolist()
        serving.submit(key, prompt, 24, rule, grammar)
    serving.run()
    assert (serving.num_preemptions > 0) == (num_blocks == 22)
    num_finished = 0
    for key, ((grammar, pattern), rule) in enumerate(cases):
        if grammar is None or serving.reasons[key] is not FinishReason.STOP:
            continue
        num_finished += 1
        text = text_of(serving.tokens[key])
        assert serving.tokens[key][-1] in rule.eos_token_ids
        if pattern is not None:
            assert pattern.fullmatch(text), text
        elif grammar == GRAMMARS[3][0]:
            assert text == "(" * (len(text) // 2) + "x" + ")" * (len(text) // 2)
        else:
            assert set(msgspec.json.decode(text)) <= {1, 22}
    assert num_finished > len(GRAMMARS) * len(RULES) // 2
    return serving.tokens


@pytest.mark.parametrize("first_seed", range(0, 300, 50))
def test_json_answers_validate(first_seed: int) -> None:
    """Fifty random schemas each: every finished answer satisfies its schema, and most finish."""
    schemas = [random_schema(first_seed + i) for i in range(50)]
    serving = Serving(2000, 16, 512, 16, True, 2, max_model_len=400)
    errors = prepare(serving.states.grammars, *map(schema_grammar, schemas))
    assert set(errors.values()) == {None}
    params = SamplingParams(seed=SEED, eos_token_ids=ENDS)
    for key, schema in enumerate(schemas):
        serving.submit(key, [key + 1], 398, params, schema_grammar(schema))
    serving.run()
    num_finished = 0
    for key, schema in enumerate(schemas):
        if serving.reasons[key] is FinishReason.STOP:
            num_finished += 1
            answer = msgspec.json.decode(text_of(serving.tokens[key]))
            jsonschema.validate(answer, schema, jsonschema.Draft202012Validator)
    assert num_finished >= 30


def test_a_wrong_answer_does_not_validate() -> None:
    """The check can fail: without its grammar, the same model satisfies no schema."""
    serving = Serving(2000, 16, 512, 16, True, 2)
    serving.submit(0, [1], 40, SamplingParams(seed=SEED, eos_token_ids=ENDS))
    serving.run()
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(text_of(serving.tokens[0]))


def test_copies_of_a_grammar_are_apart() -> None:
    """Requests with the same grammar, choices of one prompt for example, do not share a state."""
    table = GrammarTable(VOCAB_SIZE)
    grammar = choice_constraint("c", ["ab", "cd"]).grammar
    assert prepare(table, grammar) == {0: None}
    params = SamplingParams(temperature=0, eos_token_ids=ENDS)
    first = SamplingRule(params, [1], VOCAB_SIZE, table.matcher(grammar))
    second = SamplingRule(params, [1], VOCAB_SIZE, table.matcher(grammar))
    request = RequestState(RequestId(0), [1], first)
    request.add_output(TOKENS.index(b"a"))
    for rule, expected in ((first, {b"b"}), (second, {b"a", b"c", b"ab", b"cd"} & set(TOKENS))):
        assert rule.constraint is not None
        zeros = np.zeros(VOCAB_SIZE, np.float32)
        allowed = np.flatnonzero(rule.constraint.allowed().restrict(zeros) == 0).tolist()
        assert {TOKENS[i] for i in allowed} == expected


def test_the_end_of_a_grammar_ends_the_request() -> None:
    """Behind the last token only ends are allowed, any of them, and again if they do not count."""
    table = GrammarTable(VOCAB_SIZE)
    grammar = choice_constraint("c", ["a"]).grammar
    prepare(table, grammar)
    params = SamplingParams(temperature=0, eos_token_ids=ENDS, min_tokens=9)
    rule = SamplingRule(params, [1], VOCAB_SIZE, table.matcher(grammar))
    logits = history_logits([5])
    for token_id in (TOKENS.index(b"a"), OTHER_EOS, EOS):
        rule.add_output(token_id)
        processed = rule.process(logits, 1)
        assert np.flatnonzero(np.isfinite(processed)).tolist() == [EOS, OTHER_EOS]


def test_min_tokens_and_stop_tokens() -> None:
    """An end waits for min_tokens where more may follow; a stop token of the client ends too."""
    grammar = regex_constraint("r", "a{1,40}").grammar
    serving = Serving(200, 4, 64, 4, True)
    prepare(serving.states.grammars, grammar, choice_constraint("c", ["a"]).grammar)
    rules = [SamplingParams(seed=i, eos_token_ids=ENDS, min_tokens=9) for i in range(8)]
    for key, rule in enumerate(rules):
        serving.submit(key, [key], 30, rule, grammar)
    serving.submit(8, [1], 30, rules[0], choice_constraint("c", ["a"]).grammar)
    stop = SamplingParams(eos_token_ids=ENDS, stop_token_ids=(TOKENS.index(b"a"),))
    serving.submit(9, [1], 30, stop, grammar)
    serving.run()
    assert all(len(serving.tokens[key]) >= 9 for key in range(8))
    assert any(serving.reasons[key] is FinishReason.STOP for key in range(8))
    assert serving.tokens[8][0] == TOKENS.index(b"a") and len(serving.tokens[8]) == 2
    assert serving.tokens[9] == [TOKENS.index(b"a")]


def test_bad_grammars_and_forgotten_ones() -> None:
    """An error is told by key; a grammar that the table forgot is compiled when it is needed."""
    table = GrammarTable(VOCAB_SIZE)
    with pytest.raises(GrammarError, match="vocabulary"):
        table.matcher(choice_constraint("c", ["a"]).grammar)
    many = [choice_constraint("c", [f"a{i}"]).grammar for i in range(MAX_GRAMMARS + 1)]
    errors = prepare(table, "start: (", *many)
    assert errors[0] is not None and "\n" not in errors[0]
    assert set(list(errors.values())[1:]) == {None}
    assert not table.matcher(many[0]).is_error()


def test_a_request_with_a_broken_grammar_fails_alone() -> None:
    """Whatever reaches the worker unprepared and wrong costs its own request only."""
    serving = Serving(200, 4, 64, 4, True)
    prepare(serving.states.grammars)
    serving.submit(0, [1, 2], 3, RULES[0], "start: (")
    serving.submit(1, [1, 2], 3, RULES[0])
    serving.run()
    assert serving.reasons[0] is FinishReason.FAILED
    assert len(serving.tokens[1]) == 3 or serving.reasons[1] is FinishReason.STOP


def test_tokens_outside_the_grammar_cannot_win() -> None:
    """The most likely token is passed over when the grammar does not allow it."""
    compiler = GrammarCompiler(vocabulary(), VOCAB_SIZE)
    matcher = compiler.compile(regex_constraint("r", "[0-4]+").grammar)
    params = SamplingParams(
        temperature=0, eos_token_ids=ENDS, logit_bias=((TOKENS.index(b"z"), 100.0),)
    )
    rule = SamplingRule(params, [1], VOCAB_SIZE, matcher)
    chance = random.Random(1)
    for _ in range(20):
        processed = rule.process(history_logits([chance.randint(0, 90)]), 0)
        assert TOKENS[int(processed.argmax())] in b"01234"


def test_a_matcher_in_error_fails_its_row_alone() -> None:
    """The row says that its grammar is at fault; the row beside it gets its token."""
    compiler = GrammarCompiler(vocabulary(), VOCAB_SIZE)
    params = SamplingParams(temperature=0, eos_token_ids=ENDS)
    grammar = choice_constraint("c", ["ab", "cd"]).grammar
    requests = [
        RequestState(
            RequestId(i), [1], SamplingRule(params, [1], VOCAB_SIZE, compiler.compile(grammar))
        )
        for i in range(2)
    ]
    requests[0].add_output(TOKENS.index(b"z"))  # what the grammar never allows
    logits = torch.from_numpy(np.stack([history_logits([5])] * 2))
    failed, sampled = Sampler(VOCAB_SIZE).sample(logits, requests)
    assert failed.token_id is None and failed.is_grammar_fault
    assert sampled.token_id in (TOKENS.index(b"a"), TOKENS.index(b"c"))
    assert not sampled.is_grammar_fault
