"""Twinkle's loader: in order, once, and where it was."""

import numpy as np
import pytest

from twinkle_jax.twinkle.dataloader import DataLoader
from twinkle_jax.twinkle.dataset import Dataset, DatasetMeta, LazyDataset
from twinkle_jax.twinkle.infra import DeviceMesh, initialize
from twinkle_jax.twinkle.processor import InputProcessor

ROWS = [{"n": n} for n in range(7)]


def numbers(loader):
    return [[row["n"] for row in batch] for batch in loader]


def test_each_iteration_takes_all_rows_in_order():
    loader = DataLoader(lambda: Dataset(DatasetMeta(data=ROWS)), batch_size=3, num_workers=2)
    assert len(loader) == 3
    assert numbers(loader) == numbers(loader) == [[0, 1, 2], [3, 4, 5], [6]]


def test_small_last_batches():
    for least in (2, 4):
        loader = DataLoader(ROWS, batch_size=3, min_batch_size=least)
        assert numbers(loader) == [[0, 1, 2], [3, 4, 5]]
    assert numbers(DataLoader(ROWS, batch_size=3, min_batch_size=1))[-1] == [6]
    assert numbers(DataLoader(ROWS, batch_size=4, min_batch_size=3))[-1] == [4, 5, 6]
    assert len(numbers(DataLoader(ROWS, batch_size=4, drop_last=True))) == 1


def test_samplers_and_shuffling():
    assert numbers(DataLoader(ROWS, batch_size=2, sampler=[4, 0, 2])) == [[4, 0], [2]]
    once = DataLoader(ROWS, batch_size=2, sampler=iter([4, 0, 2]))
    assert numbers(once) == numbers(once) == [[4, 0], [2]] and len(once) == 2
    initialize(seed=1)
    loader = DataLoader(ROWS, batch_size=7, shuffle=True)
    (first,), (second,) = numbers(loader), numbers(loader)
    assert first != second and sorted(first) == sorted(second) == list(range(7))
    again = DataLoader(ROWS, batch_size=7, shuffle=True)
    assert numbers(again) == [first]
    initialize(seed=2)
    assert numbers(DataLoader(ROWS, batch_size=7, shuffle=True)) != [first]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batches", [1, 3, 4])
def test_it_resumes_in_the_middle_of_an_epoch(shuffle, batches):
    options = {"batch_size": 3, "shuffle": shuffle}
    loader, resumed = DataLoader(ROWS, **options), DataLoader(ROWS, **options)
    order = [row for _ in range(3) for row in numbers(loader)]
    state = DataLoader(ROWS, **options)
    for _, _ in zip(range(batches), (b for _ in range(3) for b in state), strict=False):
        pass
    resumed.resume_from_checkpoint(state.get_state()["consumed_train_samples"])
    assert [row for _ in range(2) for row in numbers(resumed)] == order[batches:][
        : len(order[batches:]) - 3 * (batches < 3)
    ]


class Sparse(list):
    def __getitem__(self, index):
        return None if index == 0 else super().__getitem__(index)


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (ROWS, {"drop_last": True, "shuffle": True}),
        (ROWS, {"min_batch_size": 2}),
        (ROWS, {"sampler": np.array([4, 0, 2, 1, 3])}),
        (Sparse(ROWS), {}),
    ],
)
def test_it_resumes_where_it_was_whatever_is_left_out(rows, options):
    options = {"batch_size": 3} | options
    loader = DataLoader(rows, **options)
    order, states = [], []
    for _ in range(3):
        epoch = []
        for batch in loader:
            epoch.append([row["n"] for row in batch])
            states.append(loader.get_state())
        assert len(epoch) == len(loader)
        order += epoch
    for done, state in enumerate(states[:-1], 1):
        resumed = DataLoader(rows, **options)
        resumed.resume_from_checkpoint(**state)
        following = [batch for _ in range(4) for batch in numbers(resumed)]
        assert following[: len(order) - done] == order[done:]


def test_a_state_before_the_first_row_is_one():
    loader = DataLoader(ROWS, batch_size=4)
    loader.resume_from_checkpoint(**DataLoader(ROWS, batch_size=4).get_state())
    assert numbers(loader) == [[0, 1, 2, 3], [4, 5, 6]]
    with pytest.raises(ValueError, match="consumed_train_samples"):
        loader.resume_from_checkpoint(-1)


def test_rows_that_fail_are_replaced():
    class Bad(list):
        def __getitem__(self, index):
            if index == 1:
                raise ValueError("broken")
            return None if index == 3 else super().__getitem__(index)

    with pytest.warns(UserWarning, match="row 1"):
        got = [n for batch in numbers(DataLoader(Bad(ROWS), batch_size=7)) for n in batch]
    assert got[:5] == [0, 2, 4, 5, 6] and len(got) == 7 and not {1, 3} & set(got)
    with pytest.warns(UserWarning, match="row 1"):  # by rows of the sampler alone
        (got,) = numbers(DataLoader(Bad(ROWS), batch_size=4, sampler=[1, 5, 3, 2]))
    assert got[:2] == [5, 2] and sorted(got[2:]) == [2, 5]
    loader = DataLoader([{}, {}], batch_size=1)
    with pytest.raises(RuntimeError, match=r"dataset .*2"):
        list(loader)


@pytest.mark.parametrize("make", [list, lambda rows: LazyDataset(DatasetMeta(data=rows))])
def test_an_epoch_begins_without_what_the_last_one_added(make):
    """Completions that were appended to the messages of a batch became part of the prompts."""
    rows = [{"messages": [{"role": "user", "content": "1"}]}]
    loader = DataLoader(make(rows), batch_size=1)
    for _ in range(2):
        ((row,),) = loader
        assert len(row["messages"]) == 1
        row["messages"].append({"role": "assistant", "content": "2"})
    loader.set_processor(lambda batch: batch[0]["messages"].append(1) or len(batch[0]["messages"]))
    assert [*loader, *loader] == [2, 2] and len(rows[0]["messages"]) == 1


def test_streams_restart():
    loader = DataLoader(lambda: iter([ROWS[0], None, *ROWS[1:3]]), batch_size=2)
    with pytest.warns(UserWarning, match="consumed-data"):
        loader.resume_from_checkpoint(2)
    assert numbers(loader) == [[0, 1], [2]]


def test_a_processor_is_applied_to_each_batch():
    rows = [{"input_ids": [1, 2], "labels": [2, -100]}, {"input_ids": [3], "labels": [-100]}]
    loader = DataLoader(rows, batch_size=2)
    loader.set_processor(InputProcessor, padding_side="left")
    (batch,) = loader
    assert batch["input_ids"].tolist() == [[1, 2], [0, 3]]
    loader.set_processor("InputProcessor", padding_free=True)
    (batch,) = loader
    assert batch["input_ids"].tolist() == [[1, 2, 3]]


def test_the_last_batch_is_full_with_ray_and_fits_the_default_mesh():
    """As in Twinkle: both were forgotten, and the last batch was smaller."""
    initialize(global_device_mesh=DeviceMesh.from_sizes(dp_size=2))
    assert numbers(DataLoader(ROWS, batch_size=2))[-1] == [4, 5]
    with pytest.raises(ValueError, match="batch_size"):
        DataLoader(ROWS, batch_size=3)
    with pytest.warns(UserWarning, match="ray"):
        initialize("ray", global_device_mesh=DeviceMesh.from_sizes(dp_size=2))
    loader = DataLoader(ROWS, batch_size=3)
    assert numbers(loader) == [[0, 1, 2], [3, 4, 5]] and len(loader) == 2
    assert numbers(DataLoader(ROWS, batch_size=3, min_batch_size=1))[-1] == [6]


def test_batches_fit_the_mesh_and_options_are_known():
    mesh = DeviceMesh.from_sizes(dp_size=2)
    with pytest.raises(ValueError, match="batch_size"):
        DataLoader(ROWS, batch_size=3, device_mesh=mesh)
    assert numbers(DataLoader(ROWS, batch_size=2, device_mesh=mesh))[-1] == [4, 5]
    with pytest.raises(ValueError, match="shuffle"):
        DataLoader(ROWS, batch_size=2, sampler=[0], shuffle=True)
    with pytest.raises(TypeError, match="batch_sampler"):
        DataLoader(ROWS, batch_size=2, batch_sampler=[[0]])
