"""On a GPU: the allocator stays within the budget and near the prediction, and no bit of a step changes."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")

from torch import fx, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import elbowroom  # noqa: E402
from elbowroom.capture.rewrites.rewrite import _argument  # noqa: E402
from elbowroom.errors import BudgetTooSmall  # noqa: E402
from elbowroom.execute.verification import verify_step  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = "cuda"
SHARES = (1.0, 0.6)  # of what the plain step needs, resident state aside
MIB = 2**20

if torch.cuda.is_available():
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or deterministic algorithms refuse to multiply


@pytest.fixture(autouse=True)
def _the_same_bits_every_time(tmp_path_factory, monkeypatch):
    """Deterministic kernels: attention's backward is not by default, nor if it only has to warn."""
    monkeypatch.setenv("ELBOWROOM_CACHE", str(tmp_path_factory.getbasetemp() / "cuda-operators"))
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch._dynamo.reset()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


# --- two networks --------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.before, self.after = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        y = F.relu(self.before(self.first(x)), inplace=True)
        return F.relu(x + self.drop(self.after(self.second(y))))


class ResNet(nn.Module):
    """Activations of 16 MiB, about 20 of them."""

    def __init__(self, width: int = 64, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, x, y):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, drop: float, mask: str) -> None:
        super().__init__()
        self.heads, self.drop, self.mask = heads, drop, mask
        self.inside, self.outside = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, given):
        batch, length, width = x.shape
        q, k, v = self.inside(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        drop = self.drop if self.training else 0.0
        if self.mask == "flag":
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True)
        else:
            written_out = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            y = F.scaled_dot_product_attention(
                q, k, v, given if self.mask == "given" else written_out, dropout_p=drop
            )
        return self.outside(y.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, drop: float, mask: str) -> None:
        super().__init__()
        self.attention = Attention(width, heads, drop, mask)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.drop = nn.Dropout(drop)

    def forward(self, x, given):
        x = x + self.drop(self.attention(self.first(x), given))
        return x + self.drop(self.down(F.gelu(self.up(self.second(x)))))


class Gpt(nn.Module):
    def __init__(self, layers: int = 3, width: int = 256, drop: float = 0.1, mask: str = "flag") -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(512, width), nn.Embedding(256, width)
        self.layers = nn.ModuleList(Layer(width, 4, drop, mask) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 512, bias=False)
        self.register_buffer("seen", torch.ones(256, 256, dtype=torch.bool).tril(), persistent=False)

    def forward(self, tokens):
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.places(torch.arange(length, device=tokens.device))
        for layer in self.layers:
            x = layer(x, self.seen[:length, :length])
        logits = self.head(self.norm(x))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def resnet():
    model = ResNet().to(DEVICE)
    return model, (torch.randn(16, 3, 64, 64, device=DEVICE), torch.randint(10, (16,), device=DEVICE)), nullcontext


def gpt(**options):
    model = Gpt(**options).to(DEVICE)
    tokens = torch.randint(512, (32, 256), device=DEVICE)
    return model, (tokens,), lambda: torch.autocast(DEVICE, torch.bfloat16)


NETWORKS = {"resnet": resnet, "gpt": gpt}


def step(model, batch, precision):
    with precision():
        loss = model(*batch)
    loss.backward()
    return loss.detach()


def warm_up(model, batch, precision) -> None:
    """A plain step on a copy: libraries make their lasting workspaces. Gradients of the model are there already."""
    step(copy.deepcopy(model), batch, precision)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    gc.collect()


def fitted_with_room(model, batch, precision):
    """Fitted with everything saved; what is resident, what the activations would like, and the least budget."""
    with precision():
        fitted = elbowroom.fit(model, *batch, budget="1TiB", strict=True, kernels="torch")
    (entry,) = fitted.elbowroom.entries.values()
    with pytest.raises(BudgetTooSmall) as too_small:
        fitted.elbowroom.set_budget(1024)
    return fitted, entry, too_small.value.least_budget


def step_peak(model, batch, precision) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step(model, batch, precision)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


# --- tests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_within_its_budgets(name):
    """What the plain step needs, a share of it, the least: peak, prediction, and every bit of the step."""
    model, batch, precision = NETWORKS[name]()
    warm_up(model, batch, precision)
    fitted, entry, least = fitted_with_room(model, batch, precision)
    resident, activations = entry.plan.resident_bytes, entry.plan.peak_bytes - entry.plan.resident_bytes
    assert activations > 100 * MIB
    budgets = [budget for share in SHARES if (budget := resident + int(share * activations)) > least]
    assert budgets, "the network leaves nothing to choose"
    for budget in (*budgets, least):
        fitted.elbowroom.set_budget(budget)
        step(fitted, batch, precision)
        measured = step_peak(fitted, batch, precision)
        assert measured <= budget
        assert entry.plan.peak_bytes == pytest.approx(measured, rel=0.02)
        with precision():
            assert verify_step(fitted.elbowroom, batch, {}).against in ("eager", "aot_eager")
    (region,) = entry.regions
    assert region.program.reruns
    assert region.program.reseeded, "no dropout was drawn again"


def test_a_budget_is_kept_in_a_process_that_has_not_multiplied_yet():
    """Libraries make a workspace in each thread that uses them; the backward runs in one of its own."""
    model, batch, precision = gpt()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    fitted, _, least = fitted_with_room(model, batch, precision)
    fitted.elbowroom.set_budget(least)
    assert step_peak(fitted, batch, precision) <= least


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 32), (32, 32), (32, 32), (32, 3)))

    def forward(self, x):
        y = x
        for layer in self.layers:
            y = torch.tanh(layer(y))
        return F.mse_loss(y, x)


def test_what_multiplies_no_matrices_pays_for_no_workspaces():
    torch.use_deterministic_algorithms(False)  # or convolutions might
    torch._C._cuda_clearCublasWorkspaces()
    batch = (torch.randn(16, 3, 128, 128, device=DEVICE),)
    fitted, entry, least = fitted_with_room(Convolutions().to(DEVICE), batch, nullcontext)
    assert entry.plan.resident["other"] < 16 * MIB
    fitted.elbowroom.set_budget(least)
    for _ in range(2):
        fitted.zero_grad()
        assert step_peak(fitted, batch, nullcontext) <= least


@pytest.mark.parametrize("name", NETWORKS)
def test_the_random_stream_goes_on_as_without_us(name):
    model, batch, precision = NETWORKS[name]()
    plain = copy.deepcopy(model)
    torch.cuda.manual_seed(5)
    step(plain, batch, precision)
    state, following = torch.cuda.get_rng_state(), torch.rand(4, device=DEVICE)
    torch.cuda.manual_seed(5)
    before = torch.cuda.get_rng_state()
    fitted, _, least = fitted_with_room(model, batch, precision)
    assert torch.equal(torch.cuda.get_rng_state(), before), "fitting drew from the stream"
    fitted.elbowroom.set_budget(least)
    step(fitted, batch, precision)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.equal(torch.rand(4, device=DEVICE), following)


def test_batch_norm_updates_once_a_step():
    model, batch, precision = resnet()
    plain = copy.deepcopy(model)
    fitted, entry, least = fitted_with_room(model, batch, precision)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True)), "fitting trained"
    (region,) = entry.regions
    graph = region.traced.graph
    assert [graph.ops[op].target for op in graph.effects].count("batch_norm_updating") == 6
    fitted.elbowroom.set_budget(least)
    for each in (fitted, plain):
        torch.cuda.manual_seed(5)
        for _ in range(2):
            each.zero_grad()
            step(each, batch, precision)
    for (name, ours), theirs in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        torch.testing.assert_close(ours, theirs[1], rtol=1e-3, atol=1e-5, msg=name)
        assert not name.endswith("num_batches_tracked") or ours == 2


@pytest.mark.parametrize("low", [False, True])
def test_a_causal_mask_written_out_becomes_a_flag(low):
    """Nearly the same results: other kernels run, which add in another order."""
    model, batch, _ = gpt(layers=2, drop=0.0, mask="written out")
    precision = (lambda: torch.autocast(DEVICE, torch.bfloat16)) if low else nullcontext
    plain = copy.deepcopy(model)
    fitted, entry, _ = fitted_with_room(model, batch, precision)
    attention = attention_nodes(entry)
    assert len(attention) == 4  # two layers, there and back
    assert all(_argument(node, "attn_bias") is None for node in attention)
    assert all(_argument(node, "is_causal") is True for node in attention)
    assert "aten.tril.default" not in {op.target for op in entry.regions[0].traced.graph.ops}
    close = 0.03 if low else 1e-3
    assert step(fitted, batch, precision).item() == pytest.approx(step(plain, batch, precision).item(), rel=close)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() <= close * theirs.grad.norm() + 1e-6, name


def test_a_mask_that_the_model_holds_is_kept():
    """It may be another one tomorrow."""
    model, batch, precision = gpt(layers=2, drop=0.0, mask="given")
    fitted, entry, _ = fitted_with_room(model, batch, precision)
    attention = attention_nodes(entry)
    assert attention
    assert all(isinstance(_argument(node, "attn_bias"), fx.Node) for node in attention)
    with precision():
        verify_step(fitted.elbowroom, batch, {})


def attention_nodes(entry) -> list[fx.Node]:
    (region,) = entry.regions
    nodes = [node for node in region.traced.nodes if "attention" in str(node.target)]
    return [node for node in nodes if "attn_bias" in {argument.name for argument in node.target._schema.arguments}]


def test_measuring_a_step():
    model, batch, precision = resnet()
    warm_up(model, batch, precision)
    fitted, entry, least = fitted_with_room(model, batch, precision)
    fitted.elbowroom.set_budget(least)
    step(fitted, batch, precision)
    with elbowroom.measure() as measured:
        step(fitted, batch, precision)
    assert measured.device == f"cuda:{torch.cuda.current_device()}"
    assert measured.start_bytes + measured.peak_bytes <= least
    assert measured.start_bytes + measured.peak_bytes == pytest.approx(entry.plan.peak_bytes, rel=0.02)
    assert abs(measured.end_bytes) < MIB
    highest = max(held for _, held in measured.timeline.moments)
    assert highest == pytest.approx(measured.peak_bytes, rel=0.05)
    assert "█" in measured.picture()
    assert measured.to_json()["peak_bytes"] == measured.peak_bytes


def test_accumulating_into_gradients_and_autograd_grad():
    """The backward runs in a thread of autograd's, which must find out what it was started for."""
    model, batch, precision = resnet()
    fitted, _, least = fitted_with_room(model, batch, precision)
    fitted.elbowroom.set_budget(least + 8 * MIB)  # the last step begins with gradients
    torch.cuda.manual_seed(5)
    state = copy.deepcopy(model.state_dict())
    with precision():
        gradients = torch.autograd.grad(fitted(*batch), list(model.parameters()))
    assert all(p.grad is None for p in model.parameters())
    model.load_state_dict(state)
    torch.cuda.manual_seed(5)
    step(fitted, batch, precision)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    model.load_state_dict(state)
    torch.cuda.manual_seed(5)
    step(fitted, batch, precision)
    assert all(torch.equal(p.grad, g + g) for p, g in zip(model.parameters(), gradients, strict=True))


CAPPED = """
import sys, torch, elbowroom
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(float(sys.argv[1]) * 2**30 / total)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))).cuda()
elbowroom.fit(model, torch.randn(64, 256, device="cuda"), budget="1GiB", kernels="torch")
settings = torch.cuda.memory._snapshot()["allocator_settings"]
print(settings["expandable_segments"], any("expandable" in note for note in model.elbowroom.plan.notes))
"""


@pytest.mark.parametrize(
    ("allowed_gib", "chosen", "said"),
    [("1.2", None, "True True"), ("4", None, "False False"), ("1.2", "expandable_segments:False", "False False")],
)
def test_memory_is_taken_in_segments_that_expand_where_little_more_than_the_budget_is_to_be_had(
    allowed_gib, chosen, said
):
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    environment |= {"PYTORCH_CUDA_ALLOC_CONF": chosen} if chosen else {}
    done = subprocess.run(
        [sys.executable, "-c", CAPPED, allowed_gib], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.splitlines()[-1] == said
