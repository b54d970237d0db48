"""Twinkle's data sets and preprocessors."""

from typing import NamedTuple

import pytest

from twinkle_jax.data import small_tokenizer
from twinkle_jax.twinkle.dataset import (
    Dataset,
    DatasetMeta,
    IterableDataset,
    IterablePackingDataset,
    LazyDataset,
    PackingDataset,
)
from twinkle_jax.twinkle.preprocessor import (
    DataFilter,
    EmojiDPOProcessor,
    GSM8KProcessor,
    Preprocessor,
)
from twinkle_jax.twinkle.template import Template

SUMS = [{"question": f"{n}+{n}=", "answer": f"#### {2 * n}"} for n in range(4)]


class First(Preprocessor):
    """Columns in, columns out, as scripts write them."""

    def __call__(self, rows):
        return {"messages": [[{"role": "user", "content": q[:1]}] for q in rows["question"]]}


class Small(DataFilter):
    def __call__(self, row):
        return row["question"] < "2"


def meta(rows=SUMS, **options):
    return DatasetMeta(data=rows, **options)


def template(**options):
    return Template(small_tokenizer("0123456789+="), **options)


def test_sources_by_id(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n{"n": 2}\n{"n": 3}\n')
    assert DatasetMeta("owner/name.x", "sub", "test").get_id() == "owner_name_x:sub:test"
    dataset = Dataset(DatasetMeta(str(path), data_slice=[2, 0, 4]))
    assert [row["n"] for row in dataset] == [3, 1, 2]  # 4 is 1 after the end
    for data in ({"n": [1, 2]}, lambda: iter([{"n": 1}, {"n": 2}]), ({"n": 1}, {"n": 2})):
        assert [row["n"] for row in Dataset(meta(data))] == [1, 2]
    with pytest.raises(ValueError, match="dataset_id"):
        DatasetMeta()
    assert not len(Dataset(meta([], data_slice=[])))
    for wrong in ({"data_slice": 3}, {"rows": [], "data_slice": [0]}):
        with pytest.raises(ValueError, match="data_slice"):
            Dataset(meta(**wrong))
    with pytest.raises(ValueError, match="dataset_id"):
        Dataset(DatasetMeta("ms://owner/name"))


def test_hub_ids_name_their_files(monkeypatch, tmp_path):
    calls = []
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n')

    def download(place, split, *, subset):
        calls.append((place, split, subset))
        return [tmp_path / "a.jsonl"]

    monkeypatch.setattr("twinkle_jax.twinkle.dataset.download_split", download)
    assert len(Dataset(DatasetMeta("hf://openai/gsm8k", "main", "test"))) == 1
    assert [row["n"] for row in IterableDataset(DatasetMeta("openai/gsm8k"))] == [1]
    assert calls == [("openai/gsm8k", "test", "main"), ("openai/gsm8k", "train", "data")]


def test_map_takes_names_classes_objects_and_functions():
    dataset = Dataset(meta())
    dataset.map("GSM8KProcessor", init_args={"system": "s"}, num_proc=4, remove_columns=["answer"])
    assert dataset[1] == {
        "question": "1+1=",
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1="}],
        "user_data": [("ground_truth", "2")],
    }
    dataset.map(First())
    assert dataset[1]["messages"] == [{"role": "user", "content": "1"}]
    dataset.map(lambda columns: {"x": columns["question"]})
    assert dataset[1]["x"] == "1+1="
    dataset.filter(Small)
    assert len(dataset) == 2
    with pytest.raises(ValueError, match="GSM9K"):
        dataset.map("GSM9K")
    with pytest.raises(TypeError, match="with_indices"):
        dataset.map(First(), with_indices=True)


class Value(NamedTuple):
    """A type, as Hugging Face's `datasets` has it."""

    dtype: str


class List(NamedTuple):
    """The type of a list."""

    feature: object


TURNS = {"messages": List({"role": Value("string"), "content": Value("string")})}


@pytest.mark.parametrize(
    ("kind", "values", "expected"),  # recorded from datasets 5.2.0
    [
        ("string", [1, True, 1.5, None, "x"], ["1", "true", "1.5", None, "x"]),
        ("int64", ["5", 1.0], [5, 1]),
        ("int64", [2**53 + 1, str(2**63 - 1)], [2**53 + 1, 2**63 - 1]),  # which float64 rounds
        ("float32", [1, 0.1], [1.0, 0.10000000149011612]),
        ("bool", [1, False], [True, False]),
    ],
)
@pytest.mark.parametrize("cls", [Dataset, LazyDataset])
def test_types_of_columns(kind, values, expected, cls):
    dataset = cls(meta([{"x": x} for x in values]))
    features = {"y": Value(kind), "z": Value("string"), "all": [Value(kind)]}
    dataset.map(
        lambda columns: {"y": columns["x"], "all": [[x] for x in columns["x"]]},
        remove_columns=["x"],
        features=features,
    )
    rows = [{"y": x, "z": None, "all": [x]} for x in expected]
    assert list(dataset) == rows and [type(x["y"]) for x in dataset] == list(map(type, expected))
    same = cls(meta([{"y": x} for x in values]), features={"y": Value(kind)})
    assert [row["y"] for row in same] == expected


def test_values_that_are_not_of_their_type():
    talk = {"messages": [{"role": "user"}]}
    dataset = Dataset(meta([talk]), features=TURNS)
    assert dataset[0] == {"messages": [{"role": "user", "content": None}]}
    for value, kind in (
        (1.5, "int64"),
        (300, "int8"),
        ("x", "float32"),
        (2, "bool"),
        ({}, "string"),
    ):
        with pytest.raises(ValueError, match=rf"row\['a'\] must be of the type {kind}"):
            Dataset(meta([{"a": value}]), features={"a": Value(kind)})
    with pytest.raises(ValueError, match="PIL"):
        Dataset(meta([{"a": b""}]), features={"a": Value("PIL.Image.Image")})
    with pytest.raises(ValueError, match=r"row\['messages'\]\[0\] must have the keys"):
        Dataset(meta([{"messages": [{"name": "x"}]}]), features=TURNS)
    with pytest.raises(ValueError, match="cast_column"):
        dataset.cast_column("image", decode=False)


def test_several_sources_are_mapped_one_by_one_then_together():
    first, second = meta(), meta(SUMS[:2])
    dataset = Dataset(first)
    dataset.add_dataset(second)
    with pytest.raises(ValueError, match="dataset_meta"):
        dataset.map(First())
    dataset.map(First(), dataset_meta=second)
    dataset.mix_dataset(interleave=False)
    assert [row["messages"] is None for row in dataset] == [True] * 4 + [False] * 2
    dataset.filter(lambda row: row["messages"])
    assert len(dataset) == 2


def test_encoding_keeps_columns_and_gives_lists():
    dataset = Dataset(meta())
    with pytest.raises(AssertionError, match="set_template"):
        dataset.encode()
    dataset.map(First())
    dataset.set_template(template())
    dataset.encode(add_generation_prompt=True)
    row = dataset[3]
    assert row["question"] == "3+3=" and row["messages"][0]["content"] == "3"
    assert type(row["input_ids"]) is list and row["labels"] == [-100] * row["length"]
    assert row["position_ids"] == list(range(row["length"])) == [0, 1, 2, 3]
    assert row["attention_mask"] == [1] * 4


@pytest.mark.parametrize("removed", ["note", ["note"], None])
def test_encoding_removes_the_columns_that_are_named_and_no_others(removed):
    """A name alone removed all columns whose names are parts of it."""
    dataset = Dataset(meta([{"messages": talk("1"), "note": 1, "not": 2}]))
    dataset.set_template(template())
    dataset.encode(remove_columns=removed)
    assert ("note" in dataset[0]) == (not removed) and dataset[0]["not"] == 2


def test_conversations_are_encoded_before_they_are_removed():
    """The error was that there are no messages."""
    dataset = Dataset(meta([{"messages": talk("1"), "note": 1}]))
    dataset.set_template(template())
    dataset.encode(remove_columns=["messages"])
    assert "input_ids" in dataset[0] and "messages" not in dataset[0]


def test_pairs_are_encoded_in_their_columns():
    rows = [{"prompt": "1+1=", "answer_zh": "2", "answer_en": n * "3"} for n in (1, 9)]
    dataset = Dataset(meta(rows))
    dataset.map(EmojiDPOProcessor)
    dataset.set_template(template(max_length=12, truncation_strategy="delete"))
    dataset.encode()
    assert len(dataset) == 1  # a pair goes with either of its answers
    positive, negative = dataset[0]["positive"], dataset[0]["negative"]
    assert positive["input_ids"][:6] == negative["input_ids"][:6]
    assert positive["input_ids"] != negative["input_ids"] and "labels" in negative


def test_conversations_that_are_too_long_are_deleted_or_split():
    for strategy, lengths in (("delete", [4]), ("split", [4, 4, 4, 1])):
        rows = [{"messages": [{"role": "user", "content": c}]} for c in ("1", "12345" + "6")]
        dataset = Dataset(meta(rows))
        dataset.set_template(template(max_length=4, truncation_strategy=strategy))
        dataset.encode(add_generation_prompt=True)
        assert [row["length"] for row in dataset] == lengths


def test_a_lazy_data_set_maps_and_encodes_the_row_that_is_read():
    seen = []

    def note(columns):
        seen.extend(columns["question"])
        return {"messages": [[{"role": "user", "content": "1"}]]}

    first, second = meta(), meta(SUMS[:2])
    dataset = LazyDataset(first)
    dataset.map(GSM8KProcessor(system="1"))  # of the only source
    dataset.add_dataset(second)
    dataset.map(note, dataset_meta=second, remove_columns=["answer"])
    dataset.mix_dataset()
    assert len(dataset) == 8 and not seen
    assert dataset[0]["user_data"] == [("ground_truth", "0")]
    assert set(dataset[7]) == {"question", "messages"} and seen == ["1+1="]
    assert dataset[5]["question"] == "0+0="  # the shorter source starts again
    dataset.filter(lambda row: row["user_data"] != [("ground_truth", "6")], dataset_meta=first)
    assert len(dataset) == 6 and dataset[4]["user_data"] == [("ground_truth", "4")]
    with pytest.raises(AssertionError):
        dataset.encode()
    dataset.set_template(template())
    dataset.encode(add_generation_prompt=True)
    assert "input_ids" in dataset[-2] and [len(row["input_ids"]) for row in dataset][1] == 4
    with pytest.raises(IndexError):
        dataset[8]


def test_a_lazy_data_set_concatenated_checked_and_not_split():
    dataset = LazyDataset(meta())
    dataset.add_dataset(meta(SUMS[:1]))
    dataset.mix_dataset(interleave=False)
    assert [row["question"] for row in dataset] == ["0+0=", "1+1=", "2+2=", "3+3=", "0+0="]
    dataset.set_template(template(truncation_strategy="split"))
    with pytest.raises(AssertionError, match="split"):
        dataset.encode()
    dataset.check()
    assert dataset[0] is None  # no messages


@pytest.mark.parametrize("kind", [Dataset, LazyDataset])
def test_no_source_is_left_out_silently(kind, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n{"n": 2}\n')
    dataset = kind(DatasetMeta(str(path), data_slice=[0]))
    with pytest.raises(ValueError, match="another source"):  # it would replace the first one
        dataset.add_dataset(DatasetMeta(str(path), data_slice=[1]))
    with pytest.raises(ValueError, match="dataset_meta must name one of"):
        dataset.map(lambda columns: columns, dataset_meta=meta())
    dataset.add_dataset(meta([{"n": 3}]))
    for read in (len, list, lambda rows: rows[0], lambda rows: rows.save_as(tmp_path / "b.csv")):
        with pytest.raises(ValueError, match="mix_dataset"):
            read(dataset)
    dataset.mix_dataset(interleave=False)
    with pytest.raises(ValueError, match="before mix_dataset"):
        dataset.add_dataset(meta())
    dataset.save_as(tmp_path / "b.jsonl")
    assert [row["n"] for row in Dataset(DatasetMeta(str(tmp_path / "b.jsonl")))] == [1, 3]
    with pytest.raises(ValueError, match="0 sources"):
        list(kind())


@pytest.mark.parametrize("kind", [PackingDataset, IterablePackingDataset])
def test_no_source_is_left_out_of_packed_rows(kind):
    """The first source alone was packed."""
    dataset = kind(meta([{"input_ids": [1]}]))
    dataset.add_dataset(meta([{"input_ids": [2]}]))
    dataset.set_template(template())
    with pytest.raises(ValueError, match="mix_dataset"):
        dataset.pack_dataset() or next(iter(dataset))
    dataset.mix_dataset()
    dataset.pack_dataset()
    assert [sorted(row["input_ids"]) for row in dataset] == [[1, 2]]


@pytest.mark.parametrize("kind", [Dataset, LazyDataset])
def test_a_source_without_rows_takes_no_turns(kind):
    """All rows of the other sources were left out."""
    empty = meta()
    dataset = kind(meta())
    dataset.add_dataset(empty)
    dataset.filter(lambda row: False, dataset_meta=empty)
    with pytest.raises(ValueError, match=r"interleaved, got \[4, 0\]"):
        dataset.mix_dataset()
    dataset.mix_dataset(interleave=False)
    assert len(dataset) == 4


@pytest.mark.parametrize("kind", [Dataset, LazyDataset])
def test_a_filter_sees_what_was_mapped_before(kind):
    dataset = kind(meta([{"n": 1}, {"n": 2}]))
    dataset.map(lambda columns: {"n": [10 * n for n in columns["n"]]})
    dataset.filter(lambda row: row["n"] == 20)
    dataset.map(lambda columns: {"n": [n + 1 for n in columns["n"]]})
    assert [row["n"] for row in dataset] == [21]


def test_a_filter_leaves_rows_to_each_source_that_takes_turns():
    dataset = LazyDataset(meta([{"n": 1}]))
    other = meta([{"n": 2}])
    dataset.add_dataset(other)
    dataset.mix_dataset(interleave=True)
    with pytest.raises(ValueError, match="interleaved"):
        dataset.filter(lambda row: row["n"] == 1, dataset_meta=other)
    assert [row["n"] for row in dataset] == [1, 2]


def test_what_follows_encode_and_check_sees_their_rows():
    rows = [{"messages": [{"role": "user", "content": c}]} for c in ("1", "23")]
    dataset = Dataset(meta([*rows, {"messages": []}]))
    dataset.set_template(template())
    dataset.check()
    dataset.encode()
    dataset.filter(lambda row: len(row["input_ids"]) > 3)
    dataset.map(lambda columns: {"size": [len(ids) for ids in columns["input_ids"]]})
    assert [row["size"] for row in dataset] == [4]


def test_iterators_and_slices_of_streams():
    dataset = Dataset(meta(iter(SUMS)))
    assert list(dataset) == list(dataset) == SUMS
    with pytest.raises(ValueError, match="data must be a function"):
        IterableDataset(meta(iter(SUMS)))
    with pytest.raises(ValueError, match="data_slice"):
        IterableDataset(meta(lambda: iter(SUMS), data_slice=[0]))


def test_streams_have_no_length():
    dataset = IterableDataset(meta(lambda: iter(SUMS)))
    dataset.map(GSM8KProcessor())
    dataset.set_template("Template", model_id=small_tokenizer("0123456789+="))
    assert [row["question"] for row in dataset] == [row["question"] for row in SUMS]
    with pytest.raises(NotImplementedError):
        len(dataset)
    with pytest.raises(NotImplementedError):
        dataset[0]


def test_saving(tmp_path):
    dataset = Dataset(meta())
    dataset.save_as(tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text().startswith("question,answer")
    assert list(Dataset(DatasetMeta(str(tmp_path / "a.csv")))) == SUMS
    with pytest.raises(TypeError, match="mode"):
        dataset.save_as(tmp_path / "a", mode="training")


def test_packed_rows_hold_every_row_once():
    dataset = PackingDataset(meta())
    with pytest.raises(AssertionError, match="pack_dataset"):
        len(dataset)
    dataset.map(lambda columns: {"messages": [talk(q) for q in columns["question"]]})
    dataset.set_template(template(max_length=18))
    with pytest.raises(AssertionError, match="encode"):
        dataset.pack_dataset()
    dataset.encode()
    alone = [row["input_ids"] for row in dataset.dataset]
    dataset.pack_dataset()
    assert [len(row["input_ids"]) for row in dataset] == [18, 18]
    for row in dataset:
        starts = [i for i, position in enumerate(row["position_ids"]) if position == 0]
        assert starts == [0, 9] and row["length"] == [9, 9] and len(row["question"]) == 2
        assert len(row["labels"]) == len(row["attention_mask"]) == 18
    parts = [row["input_ids"][i : i + 9] for row in dataset for i in (0, 9)]
    assert sorted(parts) == sorted(alone)


def talk(question):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": "2"}]


def test_packed_rows_are_2048_wide_without_a_template_that_says_so():
    rows = [{"input_ids": [1] * size} for size in (1500, 548, 100)]
    dataset = PackingDataset(meta(rows))
    dataset.set_template(lambda trajectory: trajectory)
    dataset.pack_dataset()
    assert sorted(len(row["input_ids"]) for row in dataset) == [100, 2048]


@pytest.mark.parametrize("encoded", [False, True])
def test_a_packed_stream_carries_its_last_row_over(encoded):
    rows = [{"messages": talk(f"{n}+{n}=")} for n in range(5)]
    dataset = IterablePackingDataset(meta(lambda: iter(rows)), packing_interval=3)
    dataset.set_template(template(max_length=18))
    with pytest.raises(AssertionError, match="pack_dataset"):
        next(iter(dataset))
    if encoded:
        dataset.encode()
    dataset.pack_dataset()
    assert [len(row["input_ids"]) for row in dataset] == [18, 18, 9]
    assert [len(row["messages"]) for row in dataset] == [2, 2, 1]
    dataset.cyclic = True
    cycled = [row for row, _ in zip(dataset, range(7), strict=False)]
    assert all(len(row["input_ids"]) == 18 for row in cycled)
    assert cycled[0]["input_ids"][:9] == cycled[5]["input_ids"][:9]
    empty = IterablePackingDataset(meta(lambda: iter([])), cyclic=True)
    empty.set_template(template())
    empty.pack_dataset()
    assert next(iter(empty), None) is None
    empty.set_template(template(truncation_strategy="split"))
    with pytest.raises(AssertionError, match="split"):
        empty.pack_dataset()
