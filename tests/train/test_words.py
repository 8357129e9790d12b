"""Tests of the configuration: defaults, saving and loading, strict YAML, and `key=value` arguments.

The tests of `key=value` arguments cover error messages, short forms and malformed arguments.
"""

import re
from inspect import cleandoc

import pytest
import yaml

from grpo_fast import LossConfig
from grpo_fast.doctor.command import read
from grpo_fast.errors import nearest_name
from grpo_fast.rollout.engine import VLLMOptions
from grpo_fast.train.config import LossSettings, RunConfig, load_recipe, recipe_names
from grpo_fast.train.config.words import (
    described,
    dotted_keys,
    other_names,
    quoted,
    read_yaml,
    recipe_in,
    save_config,
    validated,
)
from grpo_fast.train.evaluate import read_settings
from grpo_fast.train.plan import plan
from tests.command_line import invoke, refused

MINIMAL = {
    "model": {"config": {"model_type": "llama"}, "tokenizer": "symbols"},
    "data": {"task": "sort"},
    "rewards": [{"name": "sort_positions"}],
}


def test_every_shipped_recipe_is_valid(tmp_path):
    assert set(recipe_names()) == {
        "sort", "baselines", "ppo-gsm8k", "ppo-sort", "notebook",
        "gsm8k-tiny", "gsm8k-smollm2-1.7b", "gsm8k-qwen2.5-0.5b", "gsm8k-longcontext",
        "capitals", "gsm8k-smollm2-135m", "own-data",
    }  # fmt: skip
    for name in recipe_names():
        config = load_recipe(name)
        assert config.output_dir == f"runs/{name}"
        assert isinstance(config.loss_config(), LossConfig)
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    assert load_recipe(str(path)).data.task == "sort"
    path.write_text("- just\n- a list\n")
    with pytest.raises(ValueError, match="expected a mapping"):
        load_recipe(str(path))


CORRECTED = "rollout.correct_sampling=true"
SAVED = [
    [], ["model.lora.r=8", "seed=3", "optim.max_grad_norm=.inf"], ["rollout.temperature=0.7"],
    ["rollout.temperature=0.7", "loss.temperature=1.0"], ["loss.corrections=[]"],
    [CORRECTED, "loss.corrections=[{kind: mask, low: 0.5, high: 5}]"],
    ["loss.delta=3", "loss.loss_type=grpo", "loss.kl_clamp=1"],
]  # fmt: skip


@pytest.mark.parametrize("words", SAVED, ids=str)
def test_a_saved_configuration_reads_back_equal(tmp_path, words):
    """Check that a configuration is the same after saving and loading.

    The saved file contains all settings, including the defaults.
    """
    config = load_recipe("sort", words)
    save_config(config, tmp_path / "config.yaml")
    again = load_recipe(str(tmp_path / "config.yaml"))
    assert again == config and again.loss_config() == config.loss_config()
    assert again.loss_config().temperature == (0.7 if words == ["rollout.temperature=0.7"] else 1.0)


def test_loss_settings_are_the_arguments_of_the_loss():
    given = {name: value for name, value in LossSettings() if value is not None}
    assert LossConfig(**given) == LossConfig()
    config = validated(RunConfig, {**MINIMAL, "rollout": {"temperature": 0.9, "max_new_tokens": 7}})
    loss = config.loss_config()
    assert loss.temperature == 0.9 and loss.max_completion_length == 7
    warmer = validated(RunConfig, {**MINIMAL, "loss": {"temperature": 1.2, "delta": None}})
    assert warmer.loss_config().temperature == 1.2 and warmer.loss_config().delta is None
    unset = {"temperature": None, "top_entropy_quantile": None}  # null means the default
    config = validated(RunConfig, {**MINIMAL, "rollout": {"temperature": 0.9}, "loss": unset})
    loss = config.loss_config()
    assert (loss.temperature, loss.top_entropy_quantile) == (0.9, LossConfig.top_entropy_quantile)


@pytest.mark.parametrize(
    "words, tokens",
    [
        ([], 4),
        (["data.digits=6", "rollout.max_new_tokens=9"], 9),
        (["model.tokenizer=bpe"], 256),  # a symbol may have several bpe tokens
    ],
)
def test_there_is_room_for_a_generated_answer(words, tokens, tmp_path):
    config = load_recipe("sort", words)
    assert config.rollout.max_new_tokens == tokens
    save_config(config, tmp_path / "config.yaml")
    assert load_recipe(str(tmp_path / "config.yaml")) == config


# --------------------------------------------------------------------------------------------- YAML
# This YAML text has 400 bytes, but would expand to a billion values and fill the memory. It has
# nine levels of lists, and each list consists of ten aliases of the previous list.
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
)


def test_plain_data():
    text = "a: {x: 1, y: [1.5, true, null]}\nc: {<<: {x: 1, y: 3}, x: 2}\n? 3\n: 2020-01-31\n"
    data = read_yaml(text, "t")
    assert data["a"] == {"x": 1, "y": [1.5, True, None]}
    assert data["c"] == {"x": 2, "y": 3} and str(data[3]) == "2020-01-31"
    assert read_yaml("", "t") is None and read_yaml("\ufeffa: ü→🙂", "t") == {"a": "ü→🙂"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: 1\nb: 2\na: 3", "the key 'a' appears twice in"),
        (BOMB, "aliases (*name) are not supported"),
        (f"? {BOMB.replace(chr(10), ' ')}\n: 1", ""),
        ("2020-13-45", "month must be in 1..12"),
        ("1" * 5000, "4300 digits"),
        ("[" * 3000, "recursion"),
        ("!!python/object/apply:os.getpid []", "python/object"),
        ("a: 1\n---\nb: 2", "single document"),
    ],
)
def test_what_is_refused(text, reason):
    with pytest.raises(ValueError, match="^the name: expected plain YAML, got ") as error:
        read_yaml(text, "the name")
    assert reason in str(error.value) and len(str(error.value)) < 600


def test_a_recipe_that_is_no_text(tmp_path):
    (tmp_path / "r.yaml").write_bytes("ä: 1".encode("latin-1"))
    assert refused(
        invoke("train", str(tmp_path / "r.yaml")), "r.yaml", "'utf-8' codec can't decode"
    )


def test_a_recipe_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match="^recipe r: expected plain YAML, got .*Is a directory"):
        read_yaml(tmp_path, "recipe r")
    assert refused(invoke("train", str(tmp_path)), "recipe: no such file")


READERS = {
    "train": lambda words: load_recipe("sort", words),
    "eval": lambda words: read_settings("m", words, False),
    "plan": lambda words: plan("qwen2.5-7b", words),
    "doctor": lambda words: read(["m", *words]),
}


WORD = re.compile(r" (?=[a-z_0-9.]+=)")
PPO = "advantages=gae critic={}"
IN_REWARD = "advantages=gae critic.kl_in_reward=true"


@pytest.mark.parametrize(
    ("reader", "words", "message"),
    [
        # The key is unknown. The message must name the nearest key of this section or of another
        # section. If the key is another library's name for a setting, it must name our key.
        ("train", "stpes=1", "stpes: unknown key; nearest: steps"),
        ("train", "optim.learning_rate=1", "optim.learning_rate: unknown key; here it is optim.lr"),
        ("train", "gradient_acumulation=1", "gradient_acumulation: unknown key; known: seed, "),
        ("eval", "max_completion_length=1", "here it is rollout.max_new_tokens"),
        ("train", "rollout.group_size=1e9", "rollout.group_size: Input should be a valid integer"),
        ("train", "lr=1", "lr: unknown key; nearest: optim.lr, critic.lr, warm_start.lr"),
        ("train", "rewards.0.wieght=2", "rewards.0.wieght: unknown key; nearest: weight"),
        *(("train", f"{theirs}=1", f"{theirs}: unknown key; here it is {ours}")
          for theirs, ours in other_names().items()),
        ("eval", "sample=4", "sample: unknown key; nearest: eval.samples"),
        ("eval", "dat=x.jsonl task=jsonl", "dat: unknown key; nearest: data"),
        ("eval", "recipie=sort", "recipie: unknown key; nearest: recipe"),
        ("plan", "promt=3", "promt: unknown key; nearest: prompt"),
        ("plan", "gpus=3", "gpus: unknown key; nearest: gpu"),
        ("doctor", "smaples=4", "smaples: unknown key; nearest: samples"),
        ("doctor", "treshold=1", "treshold: unknown key; nearest: threshold"),
        # The value is invalid. The message must name the nearest valid value.
        ("train", "loss.loss_type=gpro", "got 'gpro'; nearest: grpo"),
        ("train", "log.progress=ture", "log.progress: Input should be a valid boolean, got 'ture'"),
        ("train", "model.gradient_checkpointing=tru",
         "Input should be true, false or 'offload', got 'tru'; nearest: true"),
        ("train", "data.task=null", "'gsm8k' or 'jsonl', got null"),
        ("train", "loss.kl_estimator=K3", "or null, got 'K3'; nearest: k3"),
        ("eval", "task=jsonlx", "data.task: Input should be 'sort', 'open', 'gsm8k' or 'jsonl'"),
        # The argument does not have the form key=value.
        *((reader, "steps", "got 'steps'") for reader in ("train", "eval", "plan")),
        *((reader, "=5", "expected key=value, got '=5'") for reader in READERS),
        ("train", "optim..lr=5", "expected key=value, got 'optim..lr=5'"),
        ("train", "x\x1b=5", "expected key=value, got 'x\\x1b=5'"),
        # The index of a list is invalid, or the setting leaves no reward with a weight.
        ("train", "rewards.7.weight=2", "rewards.7.weight: '7' is not an index of a list of 2"),
        ("train", "rewards=[]", "rewards: expected a reward with a weight that is not 0, got none"),
        ("train", "rewards=[{name: exact_match, weight: 0}, {name: gsm8k_format, weight: 0.0}]",
         "rewards: expected a reward with a weight that is not 0"),
        ("train", "rewards.².weight=5", "'²' is not an index of a list of 2"),
        ("train", f"rewards.{'9' * 5000}.weight=2", "(5002 characters) is not an index of"),
        ("train", "steps.more=2", "steps.more: 'more' is below a value, not a section"),
        # The value has the wrong type.
        *((reader, "seed=true", "seed: Input should be a valid integer, got true")
          for reader in ("train", "eval")),
        ("train", "optim=3", "optim: Input should be a valid dictionary or instance of OptimC"),
        ("train", "optim={1: 2}", "optim.1: Keys should be strings"),
        ("train", "optim.lr=[1", "optim.lr: expected plain YAML, got '[1'"),
        ("eval", "optim={lr: 1, lr: 2}", "optim: expected plain YAML"),
        ("train", "model.config={a: &a [x], b: *a}", "model.config: expected plain YAML"),
        *(("train", f"model.device={name}", "model.device: String should match pattern '^(auto|cpu")
          for name in ("mps", "meta", "cuda:00", "cuda:-1", "cuda:100")),
        ("train", "optim.lr=.nan", "optim.lr: Input should be a finite number, got nan"),
        ("train", "advantage_options.esp=1", "esp: expected one of ['clip_high', 'clip_low']"),
        ("train", "data.path=x", "data.path: expected none for task sort, got 'x'"),
        ("plan", "gpu=H100", "gpu: expected GB of memory, such as gpu=80, got 'H100'"),
        ("plan", "gpu=0", "gpu: Input should be greater than 0, got 0"),
        ("plan", f"prompt={10**18}", "prompt: Input should be less than 9007199254740992"),
        # The number is out of bounds.
        ("train", "rollout.group_size=1000000 rollout.prompts_per_step=1000000",
         "rollout.group_size: expected at most 1048576 completions in a step"),
        ("train", "rollout.max_new_tokens=1000000000000", "rollout.max_new_tokens: "),
        ("train", "data.digits=1000000000000", "data.digits: "),
        ("train", "seed=1180591620717411303424", "seed: "),
        ("train", "warm_start.lr=.inf", "warm_start.lr: Input should be a finite number, got inf"),
        # Two settings exclude each other.
        ("train", "loss.beta=0.1", "reference.kind=none conflicts with loss.beta=0.1"),
        ("train", "minibatches=7", "minibatches: expected a number that divides"),
        ("train", "data.task=gsm8k", "data.path: expected a source for task gsm8k, got None"),
        ("train", "advantages=normalized advantage_options.eps=-1", "number >= 0, got -1"),
        ("train", "loss.softcap=3", "loss.softcap: unknown key; known: loss_type"),
        ("train", "loss.detla=3", "loss.detla: unknown key; nearest: delta"),
        ("train", "loss.delta=-1", "loss.delta: expected None or a finite number > 0, got -1"),
        *(("train", word,
         "loss.corrections conflicts with rollout.correct_sampling=false") for word in (
            "loss.corrections=[{kind: mask, low: 0.5}]", 'loss.corrections=[{"high":2}]')),
        ("train", "rollout.correct_sampling=true loss.corrections=[]",
         "rollout.correct_sampling=true conflicts with loss.corrections: "),
        ("train", "advantages=baseline advantage_options.running=1", "expected true or false"),
        ("train", "rollout.engine=vllm-server", "rollout.vllm.urls: expected at least one server"),
        ("train", "rollout.vllm.urls=[http://127.0.0.1:1]",
         "rollout.vllm.urls: expected none with engine=transformers"),
        ("train", "distributed=hsdp", "distributed_replicas: expected a number with"),
        ("train", "distributed_replicas=2", "distributed_replicas: expected a number with"),
        ("train", "critic={}", "advantages=centered conflicts with critic"),
        ("train", "advantages=gae", "advantages=gae conflicts with critic=null"),
        ("train", f"{PPO} advantage_options.eps=1", "advantages=gae conflicts with advantage_opt"),
        *(("train", f"{IN_REWARD} loss.beta=1 {word}",
           f"critic.kl_in_reward=true conflicts with {word}: ")
          for word in ("loss.beta=0", "loss.kl_estimator=exact", "loss.loss_type=dro",
                       "loss.kl_times_ratio=true")),
        ("train", f"{IN_REWARD} loss.beta=0.1", "reference.kind=none conflicts with "),
        ("train", "reference.kind=frozen loss.kl_estimator=exact rollout.top_p=0.9",
         "loss.kl_estimator=exact conflicts with rollout.replay_support=auto"),
        ("train", "reference.kind=synced model.lora={}", "reference.kind=synced conflicts with"),
        ("train", "model.path=x", "model.path: expected a model, or config (model=PATH replaces"),
        ("train", "model.config=null", "model.path: expected a model, or config"),
        ("train", "model.tokenizer=null", "model.tokenizer: expected bpe or symbols"),
        ("train", "data.columns={prompt: x}", "data.columns: expected none for task sort"),
        ("train", "rewards={name: exact_match, convention: verl}",
         "rewards.0.convention: expected none for the built-in reward exact_match, got verl"),
        ("train", "model={config: {hidden_size: 3}, tokenizer: bpe}", "model_type"),
        ("train", "model=null", "model"),
        ("train", "rollout.dynamic={} rollout.group_size=1", "rollout.group_size: expected at le"),
        ("train", "data.system_prompt={a: 1}", "system_prompt: Input should be a valid string"),
    ],
)  # fmt: skip
def test_refusals(reader, words, message):
    with pytest.raises(ValueError, match="(?s).*") as error:
        READERS[reader](WORD.split(words))
    assert message in str(error.value) and "secret" not in str(error.value), str(error.value)


def test_every_refusal_has_its_line():
    with pytest.raises(ValueError, match="(?s).*") as error:
        load_recipe("sort", ["optim.rl=1", "steps=x"])
    assert str(error.value).startswith("optim.rl: unknown key; nearest: lr\n  steps: Input should")


HOSTILE = [
    "", "=", "a=b=c", "'steps'=5", "--steps=5", "steps =5", "a" * 100_000 + "=1", "\udcff=1",
    "steps=" + "a" * 100_000, "output_dir=\x00", 'output_dir="\\x1b[31m"', "output_dir='1e-4'",
    "model.config." + "a." * 3000 + "a=1", "steps=" + "9" * 400, "steps=" + "9" * 5000, "steps=",
    "steps=5\noptim: 3", "steps=!!int 5", "steps=!foo 5", "steps=&a [*a]", "steps=1e400",
    "output_dir=!!binary aGk=", "rewards=!!set {a}", "rewards=!!omap [a: 1]", "optim={null: 2}",
    "optim={? [1] : 3}", "optim={2020-01-01: 2}", "optim={<<: {lr: 1}}", "model.config={1: 2}",
    "rewards=[]", "rewards.0=null", "rewards.0.options={1: 2}", "rewards.0.options.a.b.c=1e-6",
    "model=null", "model=PATH", "model=[]", "data={}", "data=", "data=x y", "shuffle=off",
    "log.progress=TRUE", "__class__=1", "model_fields=1", "loss.__dict__=1", "loss.loss_type={}",
]  # fmt: skip


@pytest.mark.parametrize("word", HOSTILE, ids=lambda word: ascii(word)[:30])
def test_a_hostile_word_is_refused_shortly_or_kept(word, tmp_path):
    """Check that a malformed or hostile `key=value` argument is refused with a short message.

    If the argument gives a valid configuration instead, the configuration must be the same after
    saving and loading. Only `train` is tested, because all commands parse arguments with the same
    functions.
    """
    try:
        config = load_recipe("sort", [word])
    except ValueError as error:
        assert type(error) is ValueError and 10 < len(str(error)) < 1500
        return
    save_config(config, tmp_path / "config.yaml")
    assert load_recipe(str(tmp_path / "config.yaml")) == config


def test_every_key_is_listed_with_its_type_its_default_and_a_sentence():
    said = invoke("config").output.splitlines()
    keys = [line.partition(":")[0] for line in said[::2]]
    assert keys == list(dotted_keys(RunConfig))
    assert all(text.strip().endswith(".") for text in said[1::2])
    lines = invoke("config", "optim").output.splitlines()
    assert "optim.lr: number = 1e-06" in lines and lines[0] == "optim: section"
    assert 'optim.schedule: constant | linear | cosine = "constant"' in lines
    assert "    Learning rate after the warm-up." in lines
    assert not any(line.startswith("model") for line in lines)
    assert invoke("config", "rollout.group_size").output.splitlines()[0].endswith("integer = 8")
    assert "data.task: sort | open" in invoke("config", "data").output
    assert refused(invoke("config", "optm"), "config: no key or section 'optm'; nearest: optim")
    assert "grpo-fast config" in invoke("train", "--help").output


def test_descriptions_do_not_depend_on_the_indentation_of_a_docstring(monkeypatch):
    """Check that descriptions with several lines are whole in Python 3.13, which dedents them."""
    before = described(VLLMOptions)
    monkeypatch.setattr(VLLMOptions, "__doc__", cleandoc(VLLMOptions.__doc__))
    assert described(VLLMOptions) == before and before["transfer"].endswith("otherwise gloo.")


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("mine.py:short", ["mine.py:short"]), ("{name: exact_match}", ["exact_match"]),
        ("[{name: exact_match, weight: 2}, package.module:f]", ["exact_match", "package.module:f"]),
    ],
)  # fmt: skip
def test_rewards_by_their_names_alone(value, names):
    rewards = load_recipe("sort", [f"rewards={value}", "rewards.0.weight=0.5"]).rewards
    assert [reward.name for reward in rewards] == names and rewards[0].weight == 0.5


def test_one_reward_of_a_recipe_is_replaced_by_a_name():
    first, second = load_recipe("sort", ["rewards.1=mine.py:f", "rewards.1.weight=3"]).rewards
    assert (first.name, second.name, second.weight) == ("sort_positions", "mine.py:f", 3)


def test_paths_in_a_recipe_file_are_relative_to_the_working_folder(tmp_path):
    (tmp_path / "r.yaml").write_text("model: {path: model}\ndata: {task: jsonl, path: q.jsonl}\n"
                                     "rewards: mine.py:f\n")  # fmt: skip
    config = load_recipe(str(tmp_path / "r.yaml"))
    assert (config.model.path, config.data.path) == ("model", "q.jsonl")
    assert config.rewards[0].name == "mine.py:f"


def test_a_file_that_does_not_exist_is_named_before_a_hub_is_asked(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.load_dataset", lambda *_: pytest.fail("a hub was asked"))
    monkeypatch.chdir(tmp_path)
    for recipe in ("nofile.yaml", "folder/nofile", "no.yml"):
        assert refused(invoke("train", recipe), f"recipe: no such file: '{recipe}'")
    for data in ("nofile", "nofile.jsonl", "a/b.jsonl", "a/b.parquet", "a/b/c", "./a", "~/none/x"):
        result = invoke("train", "gsm8k-tiny", f"data={data}", f"output_dir={tmp_path / 'r'}")
        assert refused(result, "data.path: ", "got nothing at", data.rpartition("/")[2])
    assert not (tmp_path / "r").exists()
    monkeypatch.setenv("RANK", "")  # no launcher has set a rank
    assert refused(invoke("train", "nofile.yaml"), "grpo-fast: recipe: no such file")


def test_numbers_are_those_of_yaml_1_2():
    options = load_recipe("sort", ["rewards.0.options={a: 1e-6, b: 010, c: 1:30}"]).rewards[0]
    assert options.options == {"a": 1e-6, "b": 10, "c": "1:30"}
    assert load_recipe("sort", ["seed=010"]).seed == 10
    assert load_recipe("sort", ["steps=1", "steps=2"]).steps == 2


def test_data_and_model_in_one_word(tmp_path):
    (tmp_path / "x.jsonl").write_text("")
    task = "data.task=jsonl"
    for source in (tmp_path / "x.jsonl", tmp_path):
        data = load_recipe("sort", [task, f"data={source}"]).data
        assert data.path == str(source)
    data = load_recipe("gsm8k-tiny", ["data=openai/gsm8k", "seed=3"]).data
    assert data.path == "openai/gsm8k"
    assert load_recipe("sort", ["data={task: open}"]).data.task == "open"
    model = load_recipe("sort", ["model=owner/name"]).model
    assert model.path == "owner/name" and model.config is None and model.tokenizer is None


def test_letters_that_changed_places_are_nearer_than_a_wrong_one():
    assert (
        nearest_name("gpro", ["gspo", "grpo"]) == nearest_name("gpro", ["grpo", "gspo"]) == "grpo"
    )
    assert nearest_name("xyz", ["grpo"]) is None and nearest_name("x", []) is None
    assert quoted("x" * 200) == f"'{'x' * 199}… (202 characters)" and quoted("x" * 198)[-1] == "'"


def test_every_name_of_another_library_has_a_key():
    keys = set(dotted_keys(RunConfig))
    for theirs, ours in other_names().items():
        assert ours.partition("=")[0] in keys, theirs


def test_a_recipe_of_null_is_none():
    assert recipe_in(["recipe=sort", "recipe=null"]) is None
    assert recipe_in(["n=1", "recipe=sort"]) == "sort"
