"""What is published is what is read: every dtype, both layouts, also by TensorDict's loader."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.utils import _STR_DTYPE_TO_DTYPE

from torchrl_vllm_sync import ParamMeta, SnapshotReader, SnapshotWriter
from torchrl_vllm_sync.errors import StaleVersionError, WeightMismatchError
from torchrl_vllm_sync.weights.module import from_json, metadata_digest, to_json
from torchrl_vllm_sync.weights.snapshots import data_file
from torchrl_vllm_sync.weights.snapshots.data_file import CHUNK_BYTES

DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and dtype not in data_file._QUANTIZED_DTYPES
    },
    key=str,
)


@pytest.fixture(params=["slots", "versions"])
def layout(request):
    return request.param


@pytest.fixture
def writer(tmp_path, layout):
    with SnapshotWriter(tmp_path / "run", layout=layout) as writer:
        yield writer


@pytest.fixture
def reader(writer):
    return SnapshotReader(writer.directory)


def named(version, names=("model.embed.weight", "model.norm.weight")):
    return [(name, torch.full((3, 5), float(version + i))) for i, name in enumerate(names)]


def metadata_of(tensors):
    return [ParamMeta.of(name, tensor) for name, tensor in tensors]


def publish(writer, version, **kwargs):
    tensors = named(version, **kwargs)
    return writer.publish(tensors, metadata_of(tensors), version)


def raw(tensor):
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist())


def random_tensor(dtype, shape, generator):
    count = torch.Size(shape).numel() * dtype.itemsize
    content = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        content %= 2
    return content.view(dtype).reshape(shape)


def test_every_dtype_and_shape_comes_back_bit_for_bit(writer, reader):
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 9), (4,), (), (0, 3), (1, 2, 3)]
    tensors = [
        (f"{str(dtype).removeprefix('torch.')}.{i}", random_tensor(dtype, shape, generator))
        for dtype in DTYPES
        for i, shape in enumerate(shapes)
    ]
    writer.publish(tensors, metadata_of(tensors), 1)
    with reader.read() as snapshot:
        assert snapshot.metadata == metadata_of(tensors)
        for (name, sent), (got_name, got) in zip(tensors, snapshot.tensors(), strict=True):
            assert (got_name, got.dtype, got.shape) == (name, sent.dtype, sent.shape)
            assert raw(got) == raw(sent)


def test_tensordicts_own_loader_reads_a_version_under_hugging_face_names(writer):
    tensors = [
        ("model.layers.0.weight", torch.randn(8, 4).bfloat16()),
        ("model.layers.0.weight.scale", torch.tensor(2.0)),
        ("lm_head.weight", torch.arange(10)),
    ]
    report = writer.publish(tensors, metadata_of(tensors), 1)
    stored = TensorDict.from_consolidated(report.path / data_file.DATA_FILE).flatten_keys(".")
    assert list(stored.keys()) == [name for name, _ in tensors]
    assert all(torch.equal(stored.get(name), tensor) for name, tensor in tensors)


def test_the_dtypes_that_tensordict_names_are_those_assumed_here():
    named = set(_STR_DTYPE_TO_DTYPE.values()) - data_file._QUANTIZED_DTYPES
    assert named == data_file._TENSORDICT_DTYPES


def test_tensors_are_cast_to_the_announced_dtype_across_pieces(writer, reader):
    big = torch.randn(CHUNK_BYTES // 2 + 3)
    strided = torch.randn(6, 4).t()
    metadata = [
        ParamMeta("big", torch.bfloat16, tuple(big.shape)),
        ParamMeta("strided", torch.float64, (4, 6)),
    ]
    writer.publish([("big", big), ("strided", strided)], metadata, 1)
    with reader.read() as snapshot:
        assert torch.equal(snapshot.tensordict.get("big"), big.bfloat16())
        assert torch.equal(snapshot.tensordict.get("strided"), strided.double())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_a_gpu_pass_through_page_locked_pieces(writer, reader, dtype):
    sizes = (3, 0, CHUNK_BYTES, 5 * CHUNK_BYTES // 4 + 7)
    tensors = [(f"p{size}", torch.randn(size, device="cuda")) for size in sizes]
    metadata = [ParamMeta(name, dtype, tuple(tensor.shape)) for name, tensor in tensors]
    writer.publish(tensors, metadata, 1)
    with reader.read() as snapshot:
        for (name, sent), (got_name, got) in zip(tensors, snapshot.tensors(), strict=True):
            assert got_name == name
            assert torch.equal(got, sent.to(dtype).cpu())


def test_tensors_are_stored_before_the_next_is_asked_for(writer, reader):
    def reusing_one_buffer():
        buffer = torch.zeros(1000)
        for i in range(3):
            yield f"p{i}", buffer.fill_(i)

    writer.publish(
        reusing_one_buffer(), [ParamMeta(f"p{i}", torch.float32, (1000,)) for i in range(3)], 1
    )
    with reader.read() as snapshot:
        assert [tensor.unique().tolist() for _, tensor in snapshot.tensors()] == [[0], [1], [2]]


def test_nothing_published_and_nothing_newer_are_none(writer, reader):
    assert reader.current() is None
    with reader.read() as snapshot:
        assert snapshot is None
    publish(writer, 4)
    assert reader.current().version == 4
    for applied, expected in [(None, 4), (3, 4), (4, None), (5, None)]:
        with reader.read(newer_than=applied) as snapshot:
            assert (snapshot and snapshot.version) == expected


def test_versions_only_grow_also_across_restarts(tmp_path, layout):
    for version in (1, 2, 5):
        with SnapshotWriter(tmp_path, layout=layout) as writer:
            publish(writer, version)
            with pytest.raises(StaleVersionError, match=f"greater than {version}, got {version}"):
                publish(writer, version)
    with SnapshotWriter(tmp_path, layout=layout) as writer:
        assert writer.last_version == 5
        with pytest.raises(StaleVersionError):
            publish(writer, 3)


def test_slots_are_reused_also_by_the_next_writer(tmp_path):
    folders = set()
    for version in range(9):
        with SnapshotWriter(tmp_path, num_slots=3) as writer:
            folders.add(publish(writer, version).path.name)
    assert len(folders) == 3


def test_other_shapes_replace_the_slots_files_one_by_one(writer, reader):
    for version in range(5):
        publish(writer, version)
    for version in range(5, 10):
        publish(writer, version, names=("a", "b", "c"))
        with reader.read() as snapshot:
            assert [name for name, _ in snapshot.tensors()] == ["a", "b", "c"]


def test_prepared_slots_are_the_ones_written(tmp_path):
    with SnapshotWriter(tmp_path, num_slots=3) as writer:
        writer.prepare(metadata_of(named(0)))
        before = sorted(path.name for path in tmp_path.glob("slot-*"))
        assert len(before) == 3
        for version in range(4):
            publish(writer, version)
        assert sorted(path.name for path in tmp_path.glob("slot-*")) == before


def test_versions_keep_the_current_the_one_before_and_what_is_read(tmp_path):
    with SnapshotWriter(tmp_path, layout="versions") as writer:
        publish(writer, 1)
        with SnapshotReader(tmp_path).read() as snapshot:
            for version in (2, 3, 7, 9):
                publish(writer, version)
            assert sorted(path.name for path in tmp_path.glob("v*")) == ["v1-1", "v7-1", "v9-1"]
            assert snapshot.tensordict.get("model.embed.weight").unique().tolist() == [1.0]
        publish(writer, 10)
        assert sorted(path.name for path in tmp_path.glob("v*")) == ["v10-1", "v9-1"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors[:1], r"announced model.norm.weight .* yielded nothing"),
        (
            lambda tensors: [*tensors, ("extra", torch.ones(1))],
            "yielded extra, which it had not",
        ),
        (lambda tensors: tensors[::-1], "announced model.embed.weight"),
        (lambda tensors: [(n, t[:1]) for n, t in tensors], r"yielded .* \[1, 5\]"),
    ],
)
def test_tensors_that_disagree_with_the_metadata_change_nothing(writer, reader, change, message):
    publish(writer, 1)
    for version in (2, 3):
        with pytest.raises(WeightMismatchError, match=message):
            writer.publish(change(named(version)), metadata_of(named(version)), version)
        with reader.read() as snapshot:
            assert snapshot.version == 1
            assert snapshot.tensordict.get("model.embed.weight").unique().tolist() == [1.0]
    publish(writer, 4)
    assert reader.current().version == 4


def test_an_error_of_the_source_passes_through_and_changes_nothing(writer, reader):
    def failing():
        yield named(2)[0]
        raise KeyError("gather failed")

    publish(writer, 1)
    with pytest.raises(KeyError, match="gather failed"):
        writer.publish(failing(), metadata_of(named(2)), 2)
    assert reader.current().version == 1
    publish(writer, 2)


def test_metadata_that_cannot_be_laid_out_are_refused(writer):
    with pytest.raises(WeightMismatchError, match="unique"):
        writer.publish([], [ParamMeta("a", torch.int8, ())] * 2, 1)
    with pytest.raises(WeightMismatchError, match="quantizer"):
        writer.publish([], [ParamMeta("a", torch.qint8, ())], 1)


def test_metadata_survive_json_and_their_digest_depends_on_every_field():
    metadata = [ParamMeta("a.b", torch.float8_e4m3fn, (2, 3)), ParamMeta("c", torch.bfloat16, ())]
    assert from_json(to_json(metadata)) == metadata
    assert to_json(metadata)[0] == ["a.b", "float8_e4m3fn", [2, 3]]
    # Pinned: the digest goes over the wire between processes and hosts.
    assert metadata_digest(metadata) == "7a136bde181c89c23fa5037f18283d2c"
    others = [
        metadata[::-1],
        metadata[:1],
        [ParamMeta("a.b", torch.float8_e5m2, (2, 3)), metadata[1]],
        [ParamMeta("a.b", torch.float8_e4m3fn, (3, 2)), metadata[1]],
        [ParamMeta("a_b", torch.float8_e4m3fn, (2, 3)), metadata[1]],
    ]
    assert len({metadata_digest(other) for other in [metadata, *others]}) == 6
    with pytest.raises(ValueError, match="got 'floaty'"):
        from_json([["a", "floaty", []]])


def test_the_report_accounts_for_the_time_and_bytes(writer):
    report = publish(writer, 1)
    assert report.version == 1
    assert report.num_bytes == 2 * 15 * 4
    assert set(report.phases) == {"acquire", "fill", "flush", "flip", "collect"}
    assert sum(report.phases.values()) <= report.seconds


def test_close_gives_the_directory_back_and_removes_it_only_when_asked(tmp_path):
    writer = SnapshotWriter(tmp_path / "run")
    publish(writer, 1)
    writer.close()
    assert SnapshotReader(tmp_path / "run").current().version == 1
    SnapshotWriter(tmp_path / "run").close(remove=True)
    assert not (tmp_path / "run").exists()
    assert SnapshotReader(tmp_path / "run").current() is None
