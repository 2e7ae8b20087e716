"""The sampler, alone and in batches; its distributions are in `test_distributions.py`."""

import random
from collections import Counter
from itertools import pairwise

import pytest
import torch

from tests.sampling.distributions import chi_square_z, count_draws, exact
from zipage.execution.sampler import Sampler, SamplingState
from zipage.sampling_params import SamplingParams

V = 40


def state(params, prompt=(), output=None, eos=(0,), vocab_size=V, index=0):
    return SamplingState(
        params, list(prompt), [] if output is None else output, eos, vocab_size, index
    )


def draw_many(logits, params, draws):
    rows = min(5000, 1_000_000 // len(logits))
    return count_draws(logits, [state(params, vocab_size=len(logits))] * rows, draws)


@pytest.mark.parametrize("vocab_size", [1, 2, 256, 257, 1500])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(top_p=0.7),
        SamplingParams(top_k=300),
        SamplingParams(min_p=0.3),
        SamplingParams(min_p=0.1, top_p=0.5),
        SamplingParams(top_k=900, top_p=0.99, min_p=1e-3),
    ],
    ids=["whole", "top_p", "top_k", "min_p", "min_p top_p", "all"],
)
def test_vocabularies_of_any_size(vocab_size, params):
    """Flat distributions over many tokens: the first candidates never suffice."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(vocab_size, generator=generator) * 0.3).tolist()
    counts, probabilities = draw_many(logits, params, draws=20_000), exact(logits, params)
    assert all(p > 0 or not count for count, p in zip(counts, probabilities, strict=True))
    width = -(-vocab_size // 60)
    bins = [slice(start, start + width) for start in range(0, vocab_size, width)]
    z = chi_square_z([sum(counts[b]) for b in bins], [sum(probabilities[b]) for b in bins])
    assert z < 4


def test_ties_at_the_cut_are_all_kept():
    logits = [0.0] * 200 + [-1.0] * 100
    for params in (SamplingParams(top_k=3), SamplingParams(top_p=0.01), SamplingParams(min_p=1)):
        counts = draw_many(logits, params, draws=20_000)
        assert chi_square_z(counts, [1 / 200] * 200 + [0.0] * 100) < 4


ALL_KINDS = [
    SamplingParams(seed=11),
    SamplingParams(seed=12, temperature=0.7, top_k=5),
    SamplingParams(seed=13, top_p=0.9),
    SamplingParams(seed=14, min_p=0.02, repetition_penalty=1.3),
    SamplingParams(seed=15, presence_penalty=0.5, frequency_penalty=0.2, logprobs=3),
    SamplingParams(temperature=0, logit_bias={3: 2.0}, logprobs=0),
    SamplingParams(seed=16, min_tokens=6, stop_token_ids=[4], top_k=150, top_p=0.99),
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, frequency_penalty=1.0, repetition_penalty=1.1),
]


def generate(batch, steps, logits_of, order=None, sampler=None):
    """Tokens and logprobs of sequences decoded together."""
    sampler = sampler or Sampler(0)
    outputs = [[] for _ in batch]
    logprobs = [[] for _ in batch]
    states = [
        state(params, [1, 2, 2, 5], outputs[i], vocab_size=300) for i, params in enumerate(batch)
    ]
    for step in range(steps):
        rows = list(range(len(batch)))
        if order:
            order.shuffle(rows)
        logits = torch.stack([logits_of(batch[i], step) for i in rows])
        result = sampler.sample(logits, [states[i] for i in rows])
        for i, token_id, entry in zip(rows, result.token_ids, result.logprobs, strict=True):
            outputs[i].append(token_id)
            logprobs[i].append(entry)
    return outputs, logprobs


def step_logits(params, step, rounded=False):
    generator = torch.Generator().manual_seed(1000 * ALL_KINDS.index(params) + step)
    logits = torch.randn(300, generator=generator) * 2
    return logits.bfloat16().float() if rounded else logits


def test_penalties_take_no_more_rows_than_sequences_run_at_once():
    """Nine sequences by turns, three at once, as after preemptions; some of their last tokens are
    only known on the device. Each is penalised as alone."""
    rng = random.Random(3)
    params = SamplingParams(temperature=0, frequency_penalty=0.2, repetition_penalty=1.1)
    logits = torch.randn(9, 300, generator=torch.Generator().manual_seed(0)) * 2

    expected = []
    for i in range(9):
        output, alone = [], Sampler()
        one = state(params, [1, 2, 5 + i], output, vocab_size=300)
        for _ in range(25):
            output += alone.sample(logits[i : i + 1], [one]).token_ids
        expected.append(output)
    assert all(2 < max(Counter(output).values()) < 20 for output in expected)

    sampler = Sampler(max_num_seqs=3)
    outputs = [[] for _ in range(9)]
    states = [state(params, [1, 2, 5 + i], outputs[i], vocab_size=300) for i in range(9)]
    unread = {}
    while any(len(output) < 25 for output in outputs):
        left = [i for i in range(9) if len(outputs[i]) + (i in unread) < 25]
        rows = rng.sample(left, min(len(left), rng.randint(1, 3))) or list(unread)
        for i in [i for i in unread if i not in rows or i not in left or rng.random() < 0.5]:
            outputs[i].append(unread.pop(i))
        rows = [i for i in rows if i in left]
        if not rows:
            continue
        launched = sampler.launch(
            logits[rows],
            [states[i] for i in rows],
            unread=[i in unread for i in rows],
            last_tokens=torch.tensor([unread.get(i, 0) for i in rows]),
        )
        for i in list(unread):
            outputs[i].append(unread.pop(i))
        unread = dict(zip(rows, launched.wait().token_ids, strict=True))
        assert len(sampler._counts.counts) == 3
    assert outputs == expected


@pytest.mark.parametrize("rounded", [False, True], ids=["fp32", "bf16 ties"])
def test_rows_do_not_depend_on_their_batch(rounded):
    def logits_of(params, step):
        return step_logits(params, step, rounded)

    together = generate(ALL_KINDS, 12, logits_of, order=random.Random(7))
    for i, params in enumerate(ALL_KINDS):
        alone = generate([params], 12, logits_of)
        assert alone[0][0] == together[0][i], params
        assert alone[1][0] == together[1][i], params


def test_seeds_and_samples():
    flat = torch.zeros(1, V)

    def stream(params, index=0, noise=0):
        sampler = Sampler(99)
        one, other = state(params, index=index), state(SamplingParams())
        tokens = []
        for _ in range(40):
            batch = [one] + [other] * noise
            tokens.append(sampler.sample(flat.expand(len(batch), -1), batch).token_ids[0])
        return tokens

    seeded = SamplingParams(seed=5)
    assert stream(seeded) == stream(seeded, noise=3)
    assert stream(seeded, index=1) == stream(SamplingParams(seed=6))
    assert stream(seeded) != stream(seeded, index=1)
    assert stream(SamplingParams(seed=-(2**63))) != stream(seeded)
    assert stream(SamplingParams()) != stream(seeded)
    assert len(set(stream(seeded))) > 10


def test_a_state_made_anew_continues_the_stream():
    flat = torch.zeros(1, V)
    output, sampler = [], Sampler(0)
    first = state(SamplingParams(seed=5), output=output)
    for _ in range(10):
        output.append(sampler.sample(flat, [first]).token_ids[0])
    resumed = state(SamplingParams(seed=5), output=output[:4])
    again = [sampler.sample(flat, [resumed]).token_ids[0] for _ in range(6)]
    assert again == output[4:]


def test_engine_seed_reproduces_unseeded_draws():
    def stream(seed):
        sampler = Sampler(seed)
        states = [state(SamplingParams()) for _ in range(3)]
        return [sampler.sample(torch.zeros(3, V), states).token_ids for _ in range(10)]

    assert stream(1) == stream(1)
    assert stream(1) != stream(2)


def test_seeded_numbers_are_uniform_over_draws_and_over_seeds():
    unused = random.Random(0)
    one = state(SamplingParams(seed=1))
    over_draws, over_seeds = [], []
    for number in range(20_000):
        one.num_sampled = number
        over_draws.append(one.uniform(unused))
        over_seeds.append(state(SamplingParams(seed=number)).uniform(unused))
    for numbers in (over_draws, over_seeds):
        counts = Counter(int(u * 100) for u in numbers)
        assert chi_square_z([counts[i] for i in range(100)], [0.01] * 100) < 4
        pairs = Counter(int(a * 10) * 10 + int(b * 10) for a, b in pairwise(numbers))
        assert chi_square_z([pairs[i] for i in range(100)], [0.01] * 100) < 4


def test_greedy_takes_the_lowest_id_on_ties():
    logits = torch.zeros(3, 1000)
    logits[0, [700, 300, 999]] = 4.0
    logits[1, 5:] = 1.0
    logits[2, 999] = 1e-6
    plain = state(SamplingParams(temperature=0), vocab_size=1000)
    assert Sampler().sample(logits, [plain] * 3).token_ids == [300, 5, 999]
    slow = state(SamplingParams(temperature=1e-6, logprobs=1), vocab_size=1000)
    output = Sampler().sample(logits, [slow, slow, plain])
    assert output.token_ids == [300, 5, 999]
    assert [list(entry) for entry in output.logprobs[:2]] == [[300], [5]]
    assert output.logprobs[0][300].rank == 1


def test_lowest_drawn_temperature_is_sane():
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(0)) * 1e30
    cold = [state(SamplingParams(temperature=1e-5)) for _ in range(4)]
    output = Sampler().sample(logits, cold)
    assert output.token_ids == logits.argmax(-1).tolist()
    hot = [state(SamplingParams(temperature=1e4, top_p=0.5)) for _ in range(4)]
    assert not Sampler().sample(logits, hot).errors


def test_logits_are_not_changed():
    logits = torch.randn(len(ALL_KINDS), 300, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    Sampler().sample(logits, [state(p, [1, 2], vocab_size=300) for p in ALL_KINDS])
    Sampler().sample(logits, [state(ALL_KINDS[4], [1, 2], [3], vocab_size=300)] * len(ALL_KINDS))
    assert torch.equal(logits, before)


# ---------------------------------------------------------------------- edits of the logits


def test_penalties_follow_their_formulas():
    """Greedy choice of edited logits, compared with the formulas over many random rows."""
    generator = torch.Generator().manual_seed(2)
    picks = random.Random(2)
    for _ in range(50):
        params = SamplingParams(
            temperature=0,
            repetition_penalty=picks.choice([1.0, 0.7, 1.5]),
            presence_penalty=picks.choice([0.0, -1.0, 1.0]),
            frequency_penalty=picks.choice([0.0, 0.4, -0.4]),
            logit_bias=picks.choice([None, {7: 3.0, 8: -3.0}]),
        )
        prompt = picks.choices(range(V), k=10)
        output = picks.choices(range(V), k=12)
        one = state(params, prompt, output)
        for _ in range(3):
            logits = torch.randn(V, generator=generator) - picks.choice([0.0, 4.0])
            expected = logits.tolist()
            for token_id, amount in (params.logit_bias or {}).items():
                expected[token_id] += amount
            for token_id in set(prompt) | set(output):
                x = expected[token_id]
                factor = params.repetition_penalty
                x = x / factor if x > 0 else x * factor
                times = output.count(token_id)
                x -= params.frequency_penalty * times + params.presence_penalty * (times > 0)
                expected[token_id] = x
            result = Sampler().sample(logits.unsqueeze(0), [one]).token_ids[0]
            assert expected[result] == pytest.approx(max(expected), abs=1e-5)
            output.append(result)


def test_long_outputs_keep_their_counts():
    output = []
    one = state(SamplingParams(temperature=0, frequency_penalty=0.01), [], output, vocab_size=500)
    for _ in range(1500):
        output += Sampler().sample(torch.zeros(1, 500), [one]).token_ids
    assert Counter(output) == Counter(dict.fromkeys(range(500), 3))


def test_min_tokens_masks_every_ending_token():
    logits = torch.zeros(1, V)
    logits[0, [0, 9, 4]] = torch.tensor([9.0, 8.0, 7.0])
    output = []
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[9])
    one = state(params, output=output, eos=(0, 10**6))
    for expected in (4, 4, 0):
        output += Sampler().sample(logits, [one]).token_ids
        assert output[-1] == expected


def test_min_tokens_that_leave_nothing_is_an_error():
    logits = torch.full((2, V), -torch.inf)
    logits[:, 0] = 1.0
    states = [state(SamplingParams(min_tokens=1)), state(SamplingParams())]
    output = Sampler().sample(logits, states)
    assert output.token_ids == [-1, 0]
    assert list(output.errors) == [0]


# ---------------------------------------------------------------------- extreme rows

KINDS_FOR_EXTREMES = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, logprobs=2),
    SamplingParams(),
    SamplingParams(seed=3, top_k=5, top_p=0.5),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=1 - 1e-16, min_p=1e-9),
    SamplingParams(presence_penalty=1.0, logprobs=V),
]


@pytest.mark.parametrize("params", KINDS_FOR_EXTREMES)
def test_a_single_finite_logit_is_chosen(params):
    for only in (0, 17, V - 1):
        logits = torch.full((1, V), -torch.inf)
        logits[0, only] = -3.0
        output = Sampler().sample(logits, [state(params)])
        assert output.token_ids == [only]
        assert not output.errors
        if params.logprobs is not None:
            assert list(output.logprobs[0]) == [only]
            assert output.logprobs[0][only].logprob == 0.0


@pytest.mark.parametrize("params", KINDS_FOR_EXTREMES)
@pytest.mark.parametrize("fault", ["nan", "one nan", "-inf", "+inf"])
def test_unusable_rows_fail_alone(params, fault):
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(4))
    if fault == "one nan":
        logits[2, 7] = torch.nan
    elif fault == "+inf":
        logits[2, 7] = torch.inf
    else:
        logits[2] = float(fault)
    states = [state(params) for _ in range(5)]
    output = Sampler().sample(logits, states)
    assert list(output.errors) == [2]
    assert "row 2" in output.errors[2]
    assert ("NaN" if "nan" in fault else fault) in output.errors[2]
    assert output.token_ids[2] == -1 and output.logprobs[2] is None
    others = [row for row in range(5) if row != 2]
    if params.greedy:
        assert [output.token_ids[r] for r in others] == logits[others].argmax(-1).tolist()
    assert all(0 <= output.token_ids[row] < V for row in others)
    assert all((output.logprobs[row] is None) == (params.logprobs is None) for row in others)


def test_nothing_to_sample():
    output = Sampler().sample(torch.zeros(0, V), [])
    assert (output.token_ids, output.logprobs, output.errors) == ([], [], {})


# ---------------------------------------------------------------------- logprobs


@pytest.mark.parametrize("wanted", [0, 1, 5, V])
def test_logprobs_are_log_softmax_of_the_raw_logits(wanted):
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(6, V, generator=generator)
    params = [
        SamplingParams(temperature=0.3, logprobs=wanted),
        SamplingParams(logprobs=wanted, logit_bias={3: 50.0}),
        SamplingParams(temperature=0, logprobs=wanted),
        SamplingParams(top_k=2, logprobs=wanted, presence_penalty=2.0),
        SamplingParams(),
        SamplingParams(temperature=2.0, logprobs=wanted, seed=1),
    ]
    output = Sampler(3).sample(logits, [state(p, output=[1, 2]) for p in params])
    expected = logits.double().log_softmax(-1)
    assert output.token_ids[1] == 3
    for row, entry in enumerate(output.logprobs):
        if row == 4:
            assert entry is None
            continue
        order = expected[row].argsort(descending=True).tolist()
        token_id = output.token_ids[row]
        assert next(iter(entry)) == token_id
        assert set(entry) == {token_id, *order[:wanted]}
        for key, item in entry.items():
            assert item.logprob == pytest.approx(expected[row, key].item(), abs=1e-6)
            assert item.rank == order.index(key) + 1
            assert item.decoded_token is None


def test_logprob_ranks_of_ties_follow_token_ids():
    logits = torch.zeros(1, V)
    logits[0, 30] = 1.0
    params = SamplingParams(temperature=0, logprobs=3, logit_bias={25: 10.0})
    entry = Sampler().sample(logits, [state(params)]).logprobs[0]
    assert [(key, item.rank) for key, item in entry.items()] == [(25, 27), (30, 1), (0, 2), (1, 3)]


# ---------------------------------------------------------------------- devices


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_seeded_draws_are_the_same_on_cuda():
    def tokens(device):
        sampler = Sampler(0, device=device)
        outputs = [[] for _ in ALL_KINDS]
        states = [
            SamplingState(params, [1, 2, 2, 5], output, (0,), 300)
            for params, output in zip(ALL_KINDS, outputs, strict=True)
        ]
        for step in range(12):
            logits = torch.stack([step_logits(params, step) for params in ALL_KINDS]).to(device)
            for output, token_id in zip(
                outputs, sampler.sample(logits, states).token_ids, strict=True
            ):
                output.append(token_id)
        return outputs

    assert tokens("cuda") == tokens("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_waits_for_the_device(dtype):
    """Steps launched one after another, each seeing the tokens of the ones before it."""
    sampler, outputs = Sampler(0, device="cuda"), [[] for _ in ALL_KINDS]
    states = [
        SamplingState(params, [1, 2, 2, 5], output, (0,), 300)
        for params, output in zip(ALL_KINDS, outputs, strict=True)
    ]
    steps = [
        torch.stack([step_logits(params, step) for params in ALL_KINDS]).to("cuda", dtype)
        for step in range(12)
    ]
    launched, last = [], None
    sampler.launch(steps[0], states).wait()  # compiles kernels
    for state in states:
        state.num_sampled = 0
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step, logits in enumerate(steps):
            unread = [step > 0] * len(states)
            launched.append(sampler.launch(logits, states, None, unread, last))
            last = launched[-1].token_ids
            # The token before the last one is known on the host by now.
            if step:
                torch.cuda.set_sync_debug_mode("default")
                known = launched[step - 1].wait().token_ids
                torch.cuda.set_sync_debug_mode("error")
                for output, token_id in zip(outputs, known, strict=True):
                    output.append(token_id)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    final = launched[-1].wait()
    again, expected = Sampler(0, device="cuda"), [[] for _ in ALL_KINDS]
    states = [
        SamplingState(params, [1, 2, 2, 5], output, (0,), 300)
        for params, output in zip(ALL_KINDS, expected, strict=True)
    ]
    for logits in steps:
        output = again.sample(logits, states)
        for tokens, token_id in zip(expected, output.token_ids, strict=True):
            tokens.append(token_id)
    assert [[*o, t] for o, t in zip(outputs, final.token_ids, strict=True)] == expected
    assert final.logprobs == output.logprobs
