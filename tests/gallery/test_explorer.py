"""The explorer in a real browser: its JavaScript says what the package says, and anybody can use the page."""

import json
import re
import shlex
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from browser import chromium, violations
from oldest import BROKEN

import ropepatch
from ropepatch import METHODS
from ropepatch.attention import make_remapping
from ropepatch.errors import RopepatchError
from ropepatch.gallery.explorer.content import methods, presets, remappings, rope_entry
from ropepatch.gallery.explorer.tiny import quantised, reading
from ropepatch.model.checkpoint import InMemory
from ropepatch.model.config import Config
from ropepatch.scaling import make_scaling
from ropepatch.scaling.rope import Rope


def expect(place):
    return pytest.importorskip("playwright.sync_api").expect(place)


TIMES = (1.5, 4, 32)  # the window
SETTINGS = {  # beside the defaults
    "yarn": [
        {"beta_fast": 16.0, "truncate": False},
        {"ramp": "wavelength"},
        {"ramp": "rotations"},
    ],
    "ntk-by-parts": [{"alpha": 0.5, "beta": 8.0}],
    "giraffe-power": [{"power": 0.5, "interpolate": True}],
    "giraffe-truncated": [{"cutoff": 100.0, "interpolate": True}],
    "p-rope": [{"partial": 0.3}],
    "resonance": [{"over": "ntk"}],
    "cope": [
        {"over": "linear", "pairs": 5, "hard": True},
        {"over": "abf", "rope_theta": 1e6},
    ],
    "dynamic": [{"form": "transformers"}],
}


GIVEN = {"abf": {"rope_theta": 5e5}}  # where Python has no default


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The page with tiny and without."""
    folder = tmp_path_factory.mktemp("explorer")
    return {
        name: ropepatch.explore(out=folder / f"{name}.html", tiny=name == "tiny")
        for name in ("tiny", "plain")
    }


@pytest.fixture(scope="module")
def opened(browser):
    """Opens a page; errors in it fail the tests."""
    errors = []

    def open_page(address, **options):
        page = browser.new_page(**options)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        return page

    yield open_page
    assert not errors


@pytest.fixture(scope="module")
def page(opened, files):
    return opened(files["plain"].as_uri())


@pytest.fixture(scope="module")
def reader(opened, files):
    return opened(files["tiny"].as_uri())


def shallow(config):
    """A configuration with one layer, where all are alike: a rope does not depend on them."""
    return (
        config | {"num_hidden_layers": 1} if config["model_type"] == "llama" else config
    )


def config_of(name):
    return next(entry["config"] for entry in presets() if entry["name"] == name)


def rope_of(entry):
    carried = entry["carried"] and tuple(entry["carried"])
    return Rope(entry["dim"], entry["theta"], entry["window"], carried, entry["factor"])


READ_ROPES = """configs => configs.map((config) => {
  try { return ropepatch.readRope(config); } catch (error) { return null; }
})"""


@pytest.mark.slow
def test_every_configuration_has_the_rope_that_transformers_computes(page):
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    }
    linear = {"rope_type": "linear", "factor": 2.5}
    base = config_of("llama-2-7b")
    dropped = [
        base | {"rope_scaling": scaling, "head_dim": 64} for scaling in (yarn, linear)
    ]
    partly = {
        "model_type": "phi",
        "hidden_size": 2560,
        "num_attention_heads": 32,
        "partial_rotary_factor": 0.4,
    }
    nested = {  # as google/gemma-3-4b-it publishes it
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
    }
    dropped += [nested, partly]
    listed = [entry["config"] for entry in presets()[1:]]
    configs = [*(one for one in listed if one["model_type"] not in BROKEN), *dropped]
    found = page.evaluate(READ_ROPES, configs)
    for config, got in zip(configs, found, strict=True):
        try:
            wanted = rope_entry(InMemory("", None, Config(shallow(config))))
        except RopepatchError:
            assert got is None, config["model_type"]
            continue
        carried, mine = wanted.pop("carried"), got.pop("carried")
        assert got == pytest.approx(wanted, rel=1e-9)
        assert (mine is None) == (carried is None)
        if carried:
            np.testing.assert_allclose(mine, carried, rtol=1e-6)


CALCULATE = """([rope, name, length, given]) => {
  try { const [f, a] = ropepatch.scaled(name, rope, length, given); return [Array.from(f), a]; }
  catch (error) { return null; }
}"""


@pytest.mark.slow
def test_every_method_has_the_frequencies_of_the_package(page):
    entries = [
        rope_entry(InMemory("", None, Config(shallow(config_of(name)))))
        for name in ("llama-2-7b", "llama-3.1-8b")
    ]
    entries += [
        presets()[0]["rope"],
        {"dim": 6, "theta": 1e6, "window": 333, "carried": None, "factor": 1.0},
    ]
    cases = [
        (entry, name, round(times * entry["window"]), given)
        for entry in entries
        for times in TIMES
        for name in methods()
        for given in [{}, *SETTINGS.get(name, [])]
    ]
    found = page.evaluate(f"cases => cases.map({CALCULATE})", cases)
    compared = set()
    for (entry, name, length, given), got in zip(cases, found, strict=True):
        rope = rope_of(entry)
        composing = METHODS[name].composing if rope.is_scaled else {}
        try:
            scaling = make_scaling(
                name,
                factor=length / entry["window"],
                **{**GIVEN.get(name, {}), **composing, **given},
            )
            wanted = scaling.frequencies(rope, length)
        except RopepatchError:
            assert got is None, (name, given)
            continue
        assert got is not None, (name, given)
        np.testing.assert_allclose(
            got[0], wanted.inv_freq.tolist(), rtol=1e-6, err_msg=f"{name} {given}"
        )
        assert got[1] == pytest.approx(wanted.attention_factor, rel=1e-6)
        compared.add(name)
    assert compared == set(methods())


REMAPPED = """([name, L, N, given, positions]) => {
  const p = ropepatch.fitted(name, L, N, given);
  try { ropepatch.checkMap(name, p, L, N); } catch (error) { return null; }
  const bands = ropepatch.PLACES[name].bands(p);
  return [p, positions.map((m) => positions.map((n) => (n > m ? null : ropepatch.readAt(bands, m, n))))];
}"""


@pytest.mark.slow
def test_every_map_reads_at_the_distances_of_the_package(page):
    cases = []
    for name in remappings():
        for window, target in ((256, 400), (256, 1024), (4096, 30_000)):
            cases += [
                (
                    name,
                    window,
                    target,
                    {},
                    [*range(0, 40, 3), *range(40, target, target // 37), target - 1],
                )
            ]
    cases += [
        ("self-extend", 256, 2048, {"window": 100, "group": 20}, [*range(0, 2048, 31)])
    ]
    compared = set()
    for case, got in zip(
        cases, page.evaluate(f"cases => cases.map({REMAPPED})", cases), strict=True
    ):
        name, window, target, given, positions = case
        try:
            fitted = make_remapping(name, **given).fitted(window, target)
        except RopepatchError:
            assert got is None, case[:3]
            continue
        parameters = {
            key: value for key, value in fitted.parameters().items() if key in got[0]
        }
        assert got[0] == pytest.approx(parameters, rel=1e-6)
        places = torch.tensor(positions)
        wanted = fitted.read_at(places, places).numpy()
        seen = np.tril(np.ones_like(wanted, dtype=bool))
        mine = np.array(got[1], dtype=float)
        np.testing.assert_allclose(mine[seen], wanted[seen], rtol=1e-6, err_msg=name)
        compared.add(name)
    assert compared == set(remappings())


READ = """async ([s, settings, tokens]) => {
  document.querySelector("#live").checked = false;
  const way = ropepatch.tinyWay(s, settings), prompts = ropepatch.TINY.prompts;
  const prompt = prompts.find((one) => one.length === 512 && one.depth === 0.1);
  const jobs = [ropepatch.taleReading(way, tokens), ropepatch.promptReading(way, prompt)];
  ropepatch.want(jobs);
  const read = () => jobs.every(({ key }) => ropepatch.READINGS.has(key));
  while (!read()) await new Promise((go) => requestAnimationFrame(go));
  const [tale, said] = jobs.map(({ key }) => ropepatch.READINGS.get(key));
  return [tale.losses, ropepatch.verdict(prompt, said)];
}"""


@pytest.fixture(scope="module")
def rounded():
    """tiny with the weights that the page has."""
    model, _ = ropepatch.load("tiny", device="cpu")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and name != "lm_head.weight":
                values, scales = quantised(weight)
                weight.copy_(values.float() * scales)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "found"), [("none", False), ("yarn", True), ("self-extend", True)]
)
def test_tiny_reads_in_the_page_as_in_python(reader, rounded, method, found):
    settings = {"map": method} if method in remappings() else {"method": method}
    losses, said = reader.evaluate(READ, [2, settings, 300])
    with (
        ropepatch.patch(rounded, method, to=512) if method != "none" else nullcontext(),
        torch.no_grad(),
    ):
        ids = torch.tensor(reading()["tale"][:300])
        wanted = F.cross_entropy(
            rounded(ids[None]).logits[0, :-1], ids[1:], reduction="none"
        )
        (prompt,) = (
            p for p in reading()["prompts"] if (p["length"], p["depth"]) == (512, 0.1)
        )
        asked = torch.tensor(prompt["ids"])
        likely = rounded(asked[None]).logits[0, -1 - prompt["answer"] : -1].argmax(-1)
    assert losses == pytest.approx(wanted.tolist(), abs=1e-3)
    assert said["found"] == bool((likely == asked[-prompt["answer"] :]).all()) == found


@pytest.mark.slow
def test_links_keys_and_dropped_files_change_what_is_shown(opened, files, tmp_path):
    link = "#model=llama-2-7b&to=32768&method=ntk-by-parts&set=beta%3D16&map=dca"
    page = opened(files["plain"].as_uri() + link)
    story, command = page.locator("#story"), page.locator("#command")
    expect(command).to_have_text(
        "ropepatch extend meta-llama/Llama-2-7b-hf --to 32k --method ntk-by-parts --set beta=16"
    )
    page.locator("#target").press("Home")
    expect(command).to_contain_text("drag the target")
    page.locator("#target").press("End")
    expect(story).to_contain_text("262,144")
    page.locator("#methods button", has_text="linear").first.press("Enter")
    expect(command).to_contain_text("--to 256k --method linear")
    (tmp_path / "config.json").write_text(
        json.dumps(config_of("llama-2-7b") | {"rope_theta": 1e6})
    )
    page.locator("#file").set_input_files(tmp_path / "config.json")
    expect(story).to_contain_text("your config.json")
    (tmp_path / "broken.json").write_text("{")
    page.locator("#file").set_input_files(tmp_path / "broken.json")
    expect(page.locator("#problem")).to_have_text("broken.json: no JSON.")


@pytest.mark.slow
def test_a_page_names_no_folder_and_quotes_its_command(opened, tmp_path):
    folder = tmp_path / "it's $(touch X)"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of("llama-2-7b")))
    file = ropepatch.explore(folder, out=tmp_path / "page.html", tiny=False)
    assert str(tmp_path) not in file.read_text(encoding="utf-8")
    page = opened(file.as_uri() + "#to=8192")
    (word,) = shlex.split(page.locator("#command").inner_text())[2:3]
    assert word == folder.name


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (380, "dark")])
def test_axe_finds_nothing_that_keeps_anybody_out(opened, files, width, scheme):
    link = f"{files['tiny'].as_uri()}#model=llama-2-7b&to=16384&method=yarn"
    page = opened(link, viewport={"width": width, "height": 900}, color_scheme=scheme)
    expect(page.locator("#story")).to_contain_text("18")
    found = violations(page)
    wider = page.evaluate("document.documentElement.scrollWidth > innerWidth")
    page.close()
    assert not found
    assert not wider


def test_the_page_is_small_and_loads_nothing(files):
    plain, text = (
        files[name].read_text(encoding="utf-8") for name in ("plain", "tiny")
    )
    assert len(text.encode()) < 4_000_000
    assert len(plain.encode()) < 200_000
    assert "default-src 'none'" in text
    assert not re.search(r"""(src|href)=["'](?!#)|@import|fetch\(|url\((?!#)""", plain)
