"""Claims about intervals: they cover as often as they say, and windows, not tokens, are what they count."""

import numpy as np
import pytest
import torch

from ptqpipe.check.evaluate.bootstrap import cluster_sums, interval, resampled_means, standard_error

CLUSTERS, SIZE, TRIALS, TRUTH = 60, 20, 400, 2.0


def trial(generator: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of one window share a skewed shift: 60 windows of 20, mean 2."""
    shift = generator.exponential(1.0, CLUSTERS)
    values = shift[:, None] + generator.exponential(1.0, (CLUSTERS, SIZE))
    return torch.tensor(values.ravel()), torch.arange(CLUSTERS).repeat_interleave(SIZE)


def covered(*, by_token: bool) -> float:
    """Fraction of trials whose interval holds the truth."""
    generator = np.random.default_rng(7)
    hits = 0
    for number in range(TRIALS):
        values, cluster = trial(generator)
        if by_token:
            cluster = torch.arange(len(values))
        sums, counts = cluster_sums(values, cluster)
        found = interval((sums,), counts, resamples=400, seed=number)
        assert found is not None
        hits += found[0] <= TRUTH <= found[1]
    return hits / TRIALS


def test_an_interval_covers_the_truth() -> None:
    """95 % nominal; a percentile bootstrap of 60 skewed clusters is known to give about 93 %, +-1.3 % of counting."""
    assert 0.89 <= covered(by_token=False) <= 0.98


@pytest.mark.slow
def test_counting_tokens_would_not() -> None:
    assert covered(by_token=True) < 0.6


def test_the_standard_error_is_the_spread_of_means() -> None:
    generator = np.random.default_rng(3)
    means, errors = [], []
    for _ in range(TRIALS):
        values, cluster = trial(generator)
        sums, counts = cluster_sums(values, cluster)
        means.append(sums.sum() / counts.sum())
        errors.append(standard_error(sums, counts))
    assert float(np.mean(errors)) == pytest.approx(float(np.std(means)), rel=0.12)


def test_clusters_of_unequal_size_weigh_by_tokens() -> None:
    sums, counts = cluster_sums(torch.tensor([1.0, 1.0, 1.0, 5.0]), torch.tensor([0, 0, 0, 1]))
    assert sums.tolist() == [3.0, 5.0]
    assert counts.tolist() == [3.0, 1.0]
    means = resampled_means((sums,), counts, resamples=500, seed=0)[0]
    assert set(np.round(means, 6)) == {1.0, 2.0, 5.0}


def test_a_seed_gives_the_same_interval_and_another_does_not() -> None:
    values, cluster = trial(np.random.default_rng(1))
    sums, counts = cluster_sums(values, cluster)
    assert interval((sums,), counts, seed=3) == interval((sums,), counts, seed=3)
    assert interval((sums,), counts, seed=3) != interval((sums,), counts, seed=4)


def test_a_paired_difference_is_narrower_than_its_parts() -> None:
    values, cluster = trial(np.random.default_rng(1))
    a, counts = cluster_sums(values, cluster)
    b, _ = cluster_sums(values + 0.01 * torch.randn(len(values), generator=torch.Generator().manual_seed(0)), cluster)
    paired = interval((a, b), counts, of=lambda x, y: x - y)
    single = interval((a,), counts)
    assert paired is not None
    assert single is not None
    assert (paired[1] - paired[0]) < 0.1 * (single[1] - single[0])


def test_many_clusters_are_drawn_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    from ptqpipe.check.evaluate import bootstrap

    values, cluster = trial(np.random.default_rng(1))
    sums, counts = cluster_sums(values, cluster)
    monkeypatch.setattr(bootstrap, "_CHUNK", 2 * CLUSTERS)
    assert [len(m) for m in resampled_means((sums, sums), counts, resamples=7)] == [7, 7]


def test_a_single_cluster_has_neither() -> None:
    sums, counts = cluster_sums(torch.ones(4), torch.zeros(4, dtype=torch.int64))
    assert interval((sums,), counts) is None
    assert standard_error(sums, counts) is None
