"""ScaledAdam and LANS repeat what icefall and MXNet computed."""

import pytest
from tests.contracts.table import MODES
from tests.golden.trajectories import HERE, Trajectory

from steadygrad.optim import LANS, ScaledAdam

SCALED_ADAM = sorted(file.stem for file in HERE.glob("scaled_adam*.npz"))
LANS_FILES = sorted(file.stem for file in HERE.glob("lans-*.npz"))

# The README's tolerances. `step-bounds` decays by the already updated weight where the fused form,
# and this one, take the weight before; `fp16-master` takes the weight's norm from its fp16 copy.
LANS_TOLERANCE = {"lans-step-bounds": 2e-4, "lans-fused-fp16-master": 1e-3}


def scaled_adam_tolerance(name: str) -> float:
    # Roundings of another order of sums, over some dozens of steps. The zipformer recipe keeps
    # float32 state in float64 runs too.
    if "float64" not in name:
        return 2e-6
    return 1e-6 if "zipformer" in name else 1e-14


@pytest.mark.few(10)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("name", SCALED_ADAM)
def test_scaled_adam(name, mode):
    golden = Trajectory.read(name)
    parameters = golden.parameters()
    kwargs = {k: tuple(v) if k == "betas" else v for k, v in golden.config["kwargs"].items()}
    recipe = "zipformer" if "zipformer" in name else "stateless7"
    optimizer = ScaledAdam(parameters.values(), **kwargs, recipe=recipe, **mode)
    assert golden.follow(optimizer, parameters) < scaled_adam_tolerance(name)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("name", LANS_FILES)
def test_lans(name, mode):
    golden = Trajectory.read(name)
    parameters, given = golden.parameters(), golden.config["kwargs"]
    optimizer = LANS(
        parameters.values(),
        lr=given["learning_rate"],
        weight_decay=given["wd"],
        betas=(given.get("beta1", 0.9), given.get("beta2", 0.999)),
        lower_bound=given.get("lower_bound"),
        upper_bound=given.get("upper_bound"),
        clip_value=given.get("clip_gradient"),
        **mode,
    )
    assert golden.follow(optimizer, parameters) < LANS_TOLERANCE.get(name, 2e-6)
