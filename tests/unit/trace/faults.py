"""Faults of public kinds, and where two runs part by each of them."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.unit.trace.nets import WIDTH, Fault, Transformer, batch, train

SINGLE, SEVERAL = ("single",), ("ddp", "fsdp")
BFLOAT16 = torch.bfloat16
# Of a fault of all parameters the first one: the model's own, which begins before its modules.
ALL = ""
FAULTS = {}


class Right(Fault):
    """A loop that does as it should, and what it trains.

    ``truth`` is step, stage and module where a run with the fault parts from one of ``right``.
    """

    thread, truth, unknown = "", (0, "", ""), ""
    kinds, micros, clip, dropout = (*SINGLE, *SEVERAL), 1, 1.0, 0.0
    # Whether one process computes the same: not if numbers are drawn, or batches have statistics.
    as_single = True
    shard_options = {}  # noqa: RUF012

    def net(self):
        return Transformer(self.dropout)

    def build(self, model):
        pass

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.1)


def fault(name, thread, *truth, right=Right, **settings):
    """Puts a fault into the table."""

    def put(wrong):
        for key, value in {"thread": thread, "truth": truth, "right": right, **settings}.items():
            setattr(wrong, key, value)
        FAULTS[name] = wrong
        return wrong

    return put


def setting(wrong):
    """What the runs of a fault have in common with those of others."""
    return wrong.right, wrong.micros, wrong.clip, wrong.dropout, wrong.net


def run(folder, wrong, loop=None, *, wrap=lambda model, _: model, rank=0, world=1, **options):
    """Trains with a fault; or with another loop, in all else as with it."""
    loop = (loop or wrong)()
    for name in ("micros", "clip", "dropout"):
        setattr(loop, name, getattr(wrong, name))
    start = loop.on_start

    def on_start(model, optimizer):
        start(model, optimizer)
        if dist.is_initialized():
            dist.barrier()  # each rank has emptied the folder

    loop.on_start = on_start
    torch.manual_seed(0)
    model = wrong.net(loop)
    loop.build(model)
    model = wrap(model, loop)
    torch.manual_seed(1)
    given = {"micros": loop.micros, "clip": loop.clip, **options}
    train(folder, model, loop.optimizer(model), loop, rank=rank, world=world, **given)
    return model


def bare(model):
    return model.module if isinstance(model, DistributedDataParallel) else model


def at(model, name):
    return bare(model).get_parameter(name)


def part(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def several():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


# What the model is given.


@fault("a batch is repeated", "KempnerForge#57", 2, "data", "")
class Repeated(Right):
    def on_batch(self, step, tokens, targets):
        return batch(1) if step == 2 else (tokens, targets)


@fault("data from another place on", "accelerate#2016", 2, "data", "")
class Shifted(Right):
    def on_batch(self, step, tokens, targets):
        return batch(step + 1) if step >= 2 else (tokens, targets)


@fault("another order of the data", "LongLive#71", 0, "data", "")
class Order(Right):
    def on_batch(self, step, tokens, targets):
        return batch(step + 50)


@fault("a row takes another's place", "SimpleTuner#2986", 1, "data", "")
class Row(Right):
    def on_batch(self, step, tokens, targets):
        rows = torch.arange(len(tokens)).clamp(max=len(tokens) - 2) if step == 1 else ...
        return tokens[rows], targets[rows]


@fault("ranks have the same data", "SimSiam#16", 0, "data", "", kinds=SEVERAL)
class Same(Right):
    def on_batch(self, step, tokens, targets):
        rows = torch.arange(len(tokens)) // 2 * 2
        return tokens[rows], targets[rows]


# What is drawn.


@fault("dropout is left off", "mmd#14", 2, "forward pass", "blocks.0.drop",
       dropout=0.1, as_single=False)  # fmt: skip
class Off(Right):
    def on_step(self, step, model, optimizer):
        model.train(step != 2)


@fault("a seed is not restored", "speculators#1027", 2, "random state", "blocks.0.drop",
       dropout=0.1, as_single=False)  # fmt: skip
class Seed(Right):
    def on_step(self, step, model, optimizer):
        if step == 2:
            torch.manual_seed(7)


# Weights at the start.


@fault("another initialization of a layer", "OLMo-core#307",
       0, "weights at the start", "blocks.1.mlp.1")  # fmt: skip
class Initialization(Right):
    def build(self, model):
        nn.init.normal_(model.blocks[1].mlp[1].weight, std=0.02)


@fault("a weight is transposed", "transformers#47031",
       0, "weights at the start", "blocks.0.attention.out")  # fmt: skip
class Transposed(Right):
    @torch.no_grad()
    def build(self, model):
        weight = model.blocks[0].attention.out.weight
        weight.copy_(weight.mT.clone())


@fault("weights of two layers are exchanged", "transformers#40257",
       0, "weights at the start", "blocks.1.attention.q")  # fmt: skip
class Exchanged(Right):
    def build(self, model):
        attention = model.blocks[1].attention
        attention.q.weight, attention.k.weight = attention.k.weight, attention.q.weight


@fault("a shard is loaded twice", "vllm-gguf-plugin#103",
       0, "weights at the start", "blocks.0.mlp.1")  # fmt: skip
class Shard(Right):
    @torch.no_grad()
    def on_start(self, model, optimizer):
        weight = at(model, "blocks.0.mlp.1.weight")
        if isinstance(weight, DTensor):
            dist.broadcast(weight.to_local(), 0)
        else:
            weight[len(weight) // 2 :] = weight[: len(weight) // 2].clone()


@fault("a rank has weights of its own", "detr#544",
       0, "weights at the start", "blocks.0.mlp.1", kinds=("ddp",))  # fmt: skip
class Own(Right):
    @torch.no_grad()
    def on_start(self, model, optimizer):
        if several()[0] == 1:
            at(model, "blocks.0.mlp.1.weight").mul_(1.1)


@fault("averaged weights stay in the model", "Open-Sora-Plan#186",
       2, "weights at the start", ALL)  # fmt: skip
class Averaged(Right):
    @torch.no_grad()
    def on_step(self, step, model, optimizer):
        if step == 1:
            self.kept = [p.detach().clone() for p in model.parameters()]
        if step == 2:
            for p, kept in zip(model.parameters(), self.kept, strict=True):
                p.copy_((p + kept) / 2)


# The forward pass.


def attend(self, x, mask=None, *, scale=None, ahead=0, weigh=lambda weights: weights):
    scores = self.q(x) @ self.k(x).mT
    scores = scores / WIDTH**0.5 if scale is None else scores * scale
    causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(ahead)
    return self.out(weigh(scores.masked_fill(~causal, -torch.inf).softmax(-1)) @ self.v(x))


@fault("a mask is missing", "xformers#103", 0, "forward pass", "blocks.0.attention")
class Unmasked(Right):
    def build(self, model):
        for block in model.blocks:
            block.attention.forward = partial(attend, block.attention, ahead=99)


@fault("a mask sees the next token", "LLMs-from-scratch#1063",
       0, "forward pass", "blocks.1.attention")  # fmt: skip
class Ahead(Right):
    def build(self, model):
        attention = model.blocks[1].attention
        attention.forward = partial(attend, attention, ahead=1)


@fault("a scale of the softmax is missing", "mlc-llm#3426",
       0, "forward pass", "blocks.0.attention")  # fmt: skip
class Unscaled(Right):
    def build(self, model):
        for block in model.blocks:
            block.attention.forward = partial(attend, block.attention, scale=1.0)


@fault("a residual is left out", "improved_contrastive_divergence#7",
       0, "forward pass", "blocks.1")  # fmt: skip
class Residual(Right):
    def build(self, model):
        block = model.blocks[1]

        def forward(x, mask=None):
            x = block.drop(block.attention(block.norm(x), mask))
            return x + block.mlp(x)

        block.forward = forward


@fault("positions are off by one", "transformers#15292", 0, "forward pass", "")
class Positions(Right):
    def build(self, model):
        def forward(tokens):
            x = model.embed(tokens) + model.place.roll(1, 0)
            for block in model.blocks:
                x = block(x)
            return model.head(model.norm(x))

        model.forward = forward


@fault("another activation", "Megatron-Bridge#4661", 0, "forward pass", "blocks.0.mlp.2")
class Activation(Right):
    def build(self, model):
        for block in model.blocks:
            block.mlp[2].approximate = "tanh"


@fault("another epsilon of a norm", "candle#271", 0, "forward pass", "blocks.0.norm")
class Epsilon(Right):
    def build(self, model):
        for norm in (m for m in model.modules() if isinstance(m, nn.LayerNorm)):
            norm.eps = 1e-3


@fault("autocast in one run", "pytorch#120376", 0, "forward pass", "blocks.0.attention.q")
class Autocast(Right):
    def on_step(self, step, model, optimizer):
        self.cast = torch.autocast("cpu", BFLOAT16)
        self.cast.__enter__()

    def on_end(self, step, model, optimizer):
        self.cast.__exit__(None, None, None)


@fault("shards are gathered in bfloat16", "trl#5138", 0, "forward pass", "embed",
       kinds=("fsdp",), shard_options={"mp_policy": MixedPrecisionPolicy(BFLOAT16)})  # fmt: skip
class Gathered(Right):
    pass


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.inner = nn.Embedding(40, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 40)

    @property
    def blocks(self):
        return [self.inner]

    def forward(self, tokens):
        x = self.norm(self.inner(self.embed(tokens)).flatten(0, 1))
        return self.head(x.relu().unflatten(0, tokens.shape))


def normed(_):
    return Normed()


@fault("a layer in eval mode", "mcan-vqa#26", 1, "forward pass", "norm",
       net=normed, as_single=False)  # fmt: skip
class Evaluating(Right):
    def on_step(self, step, model, optimizer):
        if step == 1:
            bare(model).norm.eval()


@fault("running statistics are lost", "torch/nn#1165", 2, "weights at the start", "norm",
       net=normed, as_single=False)  # fmt: skip
class Statistics(Right):
    def on_step(self, step, model, optimizer):
        if step == 2:
            bare(model).norm.reset_running_stats()


@fault("another momentum of statistics", "vision#8250", 0, "forward pass", "norm",
       net=normed, as_single=False)  # fmt: skip
class Momentum(Right):
    def build(self, model):
        model.norm.momentum = 0.9


# The loss.


@fault("labels are shifted twice", "transformers#47394", 0, "loss", "")
class Labels(Right):
    def on_batch(self, step, tokens, targets):
        return tokens, targets.roll(-1, 1)


class Tokens(Right):
    """A mean over all tokens that are not padding, on all processes."""

    def on_batch(self, step, tokens, targets):
        self.targets, self.part = targets.masked_fill(targets < 8, -100), 0
        return tokens, self.targets

    def on_loss(self, step, loss):
        rank, world = several()
        mine = self.targets[self.part * world + rank :: self.micros * world]
        self.part += 1
        counts = [(some != -100).sum() for some in (mine, self.targets)]
        return loss * self.micros * world * counts[0] / counts[1]


@fault("a mean of micro-batches' means", "transformers#34191", 0, "loss", "",
       right=Tokens, micros=2)  # fmt: skip
class Means(Tokens):
    def on_loss(self, step, loss):
        return loss


@fault("a loss over padding", "Yi#110", 0, "loss", "", right=Tokens)
class Padding(Right):
    pass


@fault("labels are smoothed", "cleverhans#483", 0, "loss", "")
class Smoothed(Right):
    def on_start(self, model, optimizer):
        bare(model).register_forward_hook(self.keep)

    def keep(self, module, inputs, output):
        self.logits = output

    def on_loss(self, step, loss):
        return 0.9 * loss - 0.1 * self.logits.log_softmax(-1).mean() / self.micros


@fault("a divisor of accumulation is missing", "nanoGPT#168", 0, "loss", "", micros=2, clip=0)
class Undivided(Right):
    def on_loss(self, step, loss):
        return loss * self.micros


# Clipping gives the same gradients and weights to the bit; the loss is twice as large.
@fault("a divisor is missing before clipping", "nanoGPT#168", 0, "loss", "", micros=2)
class Hidden(Undivided):
    pass


@fault("a divisor twice, and the loss is reported as before", "transformers#35207",
       0, "loss", "", micros=2, clip=0)  # fmt: skip
class Twice(Right):
    def on_loss(self, step, loss):
        return loss.detach() + (loss - loss.detach()) / self.micros


# The backward pass.


# DDP waits for gradients that do not come.
@fault("a graph is cut", "A-GCN#4", 0, "backward pass", "blocks.0.attention",
       kinds=("single", "fsdp"))  # fmt: skip
class Cut(Right):
    def build(self, model):
        attention = model.blocks[0].attention
        attention.forward = partial(attend, attention, weigh=torch.Tensor.detach)


# Gradients.


class Scaled(Right):
    """A loss scale, by hand."""

    def on_loss(self, step, loss):
        return loss * 1024

    def on_gradients(self, step, model, optimizer):
        for p in model.parameters():
            p.grad.div_(1024)


@fault("clipped before the scale is undone", "Pytorch-UNet#468", 0, "gradient", ALL, right=Scaled)
class Early(Scaled):
    def on_gradients(self, step, model, optimizer):
        nn.utils.clip_grad_norm_(model.parameters(), self.clip)
        super().on_gradients(step, model, optimizer)


class Clipped(Right):
    """Gradients are clipped here, and not in the loop."""

    def on_gradients(self, step, model, optimizer):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)


@fault("clipping is left off", "graphstorm#1366", 0, "gradient", ALL, right=Clipped, clip=0)
class Unclipped(Right):
    pass


@fault("gradients are not set to zero", "pytorch#47175", 1, "gradient", ALL)
class Zero(Right):
    def on_start(self, model, optimizer):
        optimizer.zero_grad = lambda: None


@fault("a micro-batch's gradients are lost", "openWakeWord#316", 0, "gradient", ALL, micros=2)
class Lost(Right):
    def on_start(self, model, optimizer):
        self.model, self.calls = model, 0

    def on_loss(self, step, loss):
        if self.calls % 2:
            self.model.zero_grad()
        self.calls += 1
        return loss


@fault("a layer is frozen", "byol-a#7", 0, "gradient", "blocks.0.mlp.1")
class Frozen(Right):
    def build(self, model):
        model.blocks[0].mlp[1].requires_grad_(False)


# A hook at a shard is not called.
@fault("a hook at a gradient is left", "pytorch#187268", 0, "gradient", "blocks.1.mlp.3",
       kinds=("single", "ddp"))  # fmt: skip
class Hook(Right):
    def on_start(self, model, optimizer):
        at(model, "blocks.1.mlp.3.weight").register_hook(lambda gradient: gradient / 2)


@fault("tied weights are not", "torchtune#616", 0, "gradient", "embed")
class Untied(Right):
    def build(self, model):
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())


@fault("a row of the embedding is frozen", "TuckER#17", 0, "gradient", "embed")
class Frosted(Right):
    def build(self, model):
        model.embed.padding_idx = 3


@fault("gradients are not reduced", "pytorch#53443", 1, "gradient", ALL, kinds=SEVERAL)
class Unreduced(Right):
    def on_step(self, step, model, optimizer):
        synchronize(model, step != 1)


@fault("reduced after the first micro-batch", "FunASR#3472", 0, "gradient", ALL,
       kinds=SEVERAL, micros=2)  # fmt: skip
class First(Right):
    def on_start(self, model, optimizer):
        self.calls = 0
        model.register_forward_pre_hook(self.before)

    def before(self, model, inputs):
        synchronize(model, self.calls % 2 == 0)
        self.calls += 1


def synchronize(model, on):
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = on
    else:
        model.set_requires_gradient_sync(on)


@fault("a layer's gradients are not reduced", "pytorch#12603", 0, "gradient", "blocks.0.mlp.1",
       kinds=("ddp",))  # fmt: skip
class Ignored(Right):
    def build(self, model):
        names = [f"blocks.0.mlp.1.{name}" for name in ("weight", "bias")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


@fault("a sum over ranks, not a mean", "pytorch#162338", 0, "gradient", ALL, kinds=SEVERAL, clip=0)
class Sum(Right):
    def on_start(self, model, optimizer):
        if isinstance(model, DistributedDataParallel):
            model.register_comm_hook(None, added)
        else:
            for module in (model, *model.blocks):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other factor


def added(_, bucket):
    return (
        dist.all_reduce(bucket.buffer(), async_op=True)
        .get_future()
        .then(lambda future: future.value()[0])
    )


# The optimizer.


def warm(step):
    return 1e-3 * min(1, (step + 1) / 4)


class WarmUp(Right):
    def on_step(self, step, model, optimizer):
        optimizer.param_groups[0]["lr"] = warm(step)


@fault("a rate is one step late", "deit#145", 1, "update", ALL, right=WarmUp)
class Late(Right):
    def on_step(self, step, model, optimizer):
        optimizer.param_groups[0]["lr"] = warm(max(0, step - 1))


@fault("a warm-up is forgotten", "k-diffusion#50", 0, "update", ALL, right=WarmUp)
class Cold(Right):
    pass


class Groups(Right):
    """Decay of matrices alone."""

    def optimizer(self, model):
        some = [[p for p in model.parameters() if (p.ndim > 1) == wide] for wide in (True, False)]
        groups = [{"params": some[0]}, {"params": some[1], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, 1e-3, weight_decay=0.1)


@fault("decay of biases and norms", "Fast-LLM#542", 0, "update", "blocks.0.norm", right=Groups)
class Decay(Right):
    pass


@fault("decay is left off", "HeavyBall#71", 0, "update", ALL)
class Undecayed(Right):
    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)


@fault("betas are exchanged", "tt-metal#53222", 0, "optimizer's state", ALL)
class Betas(Right):
    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), 1e-3, (0.999, 0.9), weight_decay=0.1)


@fault("another epsilon of the optimizer", "WeatherGenerator#1064", 0, "update", ALL)
class Floor(Right):
    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-3, weight_decay=0.1)


@fault("states are lost", "OneVision-Encoder#65", 2, "optimizer's state", ALL)
class Fresh(Right):
    def on_step(self, step, model, optimizer):
        if step == 2:
            optimizer.state.clear()


@fault("moments are zero", "KempnerForge#114", 2, "optimizer's state", "blocks.1.mlp.1")
class Moments(Right):
    def on_step(self, step, model, optimizer):
        if step == 2:
            for name in ("weight", "bias"):
                for moment in ("exp_avg", "exp_avg_sq"):
                    state = optimizer.state[at(model, f"blocks.1.mlp.1.{name}")]
                    part(state[moment]).zero_()


@fault("states are saved in bfloat16", "OpenTau#184", 2, "optimizer's state", ALL)
class Cast(Right):
    def on_step(self, step, model, optimizer):
        for state in optimizer.state.values() if step == 2 else ():
            for moment in (state["exp_avg"], state["exp_avg_sq"]):
                moment.copy_(moment.to(BFLOAT16))


@fault("states stay in bfloat16", "torchtitan#4615", 2, "optimizer's state", ALL)
class Narrow(Right):
    def on_step(self, step, model, optimizer):
        for state in optimizer.state.values() if step == 2 else ():
            state["exp_avg_sq"] = state["exp_avg_sq"].to(BFLOAT16)


@fault("the count of steps begins anew", "TrenTorch#187", 2, "optimizer's state", ALL)
class Count(Right):
    def on_step(self, step, model, optimizer):
        for state in optimizer.state.values() if step == 2 else ():
            state["step"].zero_()


@fault("the optimizer has other parameters", "nni#4521", 0, "optimizer's state", ALL)
class Stale(Right):
    def on_start(self, model, optimizer):
        for group in optimizer.param_groups:
            group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]
