"""Tests the HTML report: its content, escaping, and that a browser shows it."""

import base64
import contextlib
import html.parser
import io
import re
from types import SimpleNamespace

import numpy as np
import pytest
from browser import PROGRAM, Browser
from lenient import lenient
from PIL import Image
from run_files import finished, with_hyperparams, write_run
from saved import save_run

from jppo.cli.main import main
from jppo.runs import report
from jppo.runs.render import Playback
from jppo.runs.report import write_report

# Waits for the images of a page; returns the type, the width and the shown height of each.
IMAGES = """Promise.all([...document.images].map(image => image.decode().then(
  () => [image.src.split(";")[0], image.naturalWidth, image.clientHeight])))"""
METRICS = {"loss/policy": [0.1, 0.2, 0.1], "loss/value": [3.0, 2.0, 1.0], "time/steps_per_second": [1e4, 2e4, 2e4]}


@pytest.fixture(scope="module", autouse=True)
def compile_fast():
    with lenient():
        yield


class Page(html.parser.HTMLParser):
    """Collects the tags, the texts and the pictures of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open_tags, self.pictures, self.text = set(), [], [], ""
        self.feed(text)
        assert self.open_tags == [], "every tag is closed"

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        values = dict(attrs)
        assert not {name for name in values if name.startswith("on")}
        if tag == "img":
            assert values["alt"]
            head, _, data = values["src"].partition(";base64,")
            assert head in ("data:image/png", "data:image/gif")
            self.pictures.append(base64.b64decode(data))
        if tag not in ("img", "meta"):
            self.open_tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open_tags.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def runs(tmp_path):
    """Two settings with two seeds each."""
    return [
        write_run(
            tmp_path / f"{gamma}-{seed}",
            [gamma, 2.0, 3.0 + seed],
            seed=seed,
            metrics=METRICS,
            summary=finished(3.0 + seed, seconds=12.5, steps_per_second=2e4, device="<b>TPU</b>"),
            **with_hyperparams(gamma=gamma),
        )
        for gamma in (0.9, 0.5)
        for seed in (0, 1)
    ]


def test_report_has_settings_scores_curves_losses_and_speed(tmp_path, runs):
    output = tmp_path / "report.html"
    write_report(runs, output)
    page = Page(output.read_text())
    assert len(page.pictures) == 4, "return over steps and minutes, losses, speed"
    for picture in page.pictures:
        with Image.open(io.BytesIO(picture)) as image:
            assert image.format == "PNG"
    for said in ("CartPole-v1", "gamma", "0.9", "0.5", "2 finished", "3.5", "20,000", "12.5", "gae_lambda", "0.95"):
        assert said in page.text
    assert "B - A = 0.0: too few seeds" in page.text
    assert "version of jax" in page.text


def test_report_of_runs_of_a_sweep_has_no_speed(tmp_path):
    run = write_run(tmp_path / "run", [1.0, 2.0], metrics={"loss/policy": [0.1, 0.2]}, summary=finished(2.0))
    write_report([run], tmp_path / "report.html")
    page = Page((tmp_path / "report.html").read_text())
    assert "Speed At least one run has no speed, because" in " ".join(page.text.split())
    assert len(page.pictures) == 3, "return over steps and minutes, losses"


def test_report_escapes_text_from_files_and_loads_nothing(tmp_path, runs):
    evil = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&"
    bad = write_run(tmp_path / "bad", [1.0], env=evil, versions={evil: evil}, summary=finished(1.0, device=evil))
    output = tmp_path / "report.html"
    write_report([*runs, bad], output, video=True)
    text = output.read_text()
    page = Page(text)
    assert evil in page.text
    assert not page.tags & {"script", "link", "iframe", "b", "object"}
    assert "default-src 'none'" in text
    assert not re.findall(r"(?:src|href)=(?!\"data:image)", re.sub(r"&lt;.*?&gt;", "", text))


def test_report_shows_an_episode_of_the_best_run(tmp_path, runs, monkeypatch):
    def play(env, policy, *, max_steps, progress):
        frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
        frames[0].save(output := io.BytesIO(), "GIF", save_all=True, append_images=frames[1:])
        return Playback(output.getvalue(), 2, 2.5, False)

    loaded = []
    run = SimpleNamespace(agent=SimpleNamespace(env=None), policy=None)
    monkeypatch.setattr(report, "load_run", lambda path, env: loaded.append((path, env)) or run)
    monkeypatch.setattr(report, "play_gif", play)
    own = write_run(tmp_path / "own", [1.0], env="corridor:Corridor")
    write_report([*runs, own], tmp_path / "a.html", video=True, env="corridor:make")
    page = Page((tmp_path / "a.html").read_text())
    assert loaded == [(runs[1], None), (own, "corridor:make")], "of the runs with the highest return, the first"
    with Image.open(io.BytesIO(page.pictures[2])) as film:
        assert (film.format, film.n_frames) == ("GIF", 2)
    assert f"{runs[1]}: an episode of 2 steps with return 2.5" in page.text


def test_report_states_why_it_has_no_plot_or_video(tmp_path):
    path = write_run(tmp_path / "a", [1.0], counts=[0])
    write_report([path], tmp_path / "a.html", video=True)
    page = Page((tmp_path / "a.html").read_text())
    assert page.pictures == []
    assert f"{path}: no episode ended in this run" in page.text
    assert f"There is no video: {path} has no policy" in page.text
    assert "The runs have no common losses." in page.text


def test_report_command(tmp_path, runs, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(["report", *map(str, runs), "--output", "a.html"]) == 0
        assert main(["report"]) == 2
        assert main(["report", str(runs[0]), "--output", "a.pdf"]) == 2
        assert main(["report", "nowhere", "--output", "b.html"]) == 2
        assert main(["report", str(runs[0]), "--env", "corridor:make"]) == 2
    assert out.getvalue() == "wrote a.html\n"
    said = err.getvalue().splitlines()
    assert said[0].startswith("jppo: no run directory; name at least one")
    assert said[1:] == [
        "jppo: output a.pdf must end in .html",
        "jppo: nowhere is not a run directory: it has no config.json",
        "jppo: --env has no effect without --video",
    ]


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="no Chromium on the PATH: apt-get install chromium")
def test_a_browser_shows_the_report_and_its_video(tmp_path, runs):
    with_policy = tmp_path / "policy"
    save_run(with_policy)
    write_report(runs, tmp_path / "report.html")
    write_report([with_policy], tmp_path / "video.html", video=True)
    with Browser(tmp_path / "profile") as browser:
        video = browser.visit(f"file://{tmp_path / 'video.html'}", IMAGES)
        report = browser.visit(f"file://{tmp_path / 'report.html'}", IMAGES)
        screenshot = base64.b64decode(browser.send("Page.captureScreenshot", captureBeyondViewport=True)["data"])
    for visit in (report, video):
        assert visit.errors == []
        assert [url[:20] for url in visit.requests if not url.startswith(("file:", "data:"))] == []
        assert len([url for url in visit.requests if url.startswith("file:")]) == 1, "only the page itself"
        assert all(width > 0 for _, width, _ in visit.value)
    assert [kind for kind, _, _ in video.value].count("data:image/gif") == 1
    assert [height for kind, _, height in video.value if kind == "data:image/gif"] > [100], "the browser shows it"
    with Image.open(io.BytesIO(screenshot)) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    blue = (abs(pixels - [0x1F, 0x77, 0xB4]).max(axis=2) < 8).sum()
    assert blue > 500, "the first curve is visible"
