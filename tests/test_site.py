"""Tests the documentation site in a browser: scripts, images and the search work without other servers."""

import http.server
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PAGES = ("index.html?q=gae_lambda", "tutorial/train.html", "reference/settings.html", "notes/index.html")
# Collects the errors of a page, waits for the results of its search, sends a report and opens the next page.
SCRIPT = """<script>
const errors = [];
addEventListener("error", event => errors.push(event.message || event.target.src || event.target.href), true);
console.error = (...words) => errors.push(words.join(" "));
addEventListener("load", async () => {
  const found = () => [...document.querySelectorAll("a.md-search-result__link")].map(link => link.href);
  for (let i = 0; i < 200 && location.search && !found().length; i++) await new Promise(end => setTimeout(end, 100));
  const images = [...document.images].map(image => image.naturalWidth);
  const report = {errors, images, found: found(), title: document.title};
  location = await (await fetch("/report", {method: "POST", body: JSON.stringify(report)})).text();
});
</script>"""


class Site(http.server.SimpleHTTPRequestHandler):
    """Serves the site with the script in each page, and receives the reports."""

    def __init__(self, *args, reports, **kwargs):
        self.reports = reports
        super().__init__(*args, **kwargs)

    def do_GET(self):
        path = Path(self.translate_path(self.path))
        if path.suffix != ".html" or not path.exists():
            return super().do_GET()
        self.send(path.read_text().replace("<head>", f"<head>{SCRIPT}", 1), "text/html; charset=utf-8")

    def do_POST(self):
        self.reports.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        number = self.reports.visited = self.reports.visited + 1
        self.send(f"/{PAGES[number]}" if number < len(PAGES) else "about:blank", "text/plain")

    def send(self, text, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def site(tmp_path):
    """Builds the site and returns its folder."""
    folder = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, timeout=120)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on the PATH: apt-get install chromium")
def test_site_works_in_a_browser(site, tmp_path):
    reports = queue.Queue()
    reports.visited = 0
    handler = partial(Site, directory=site, reports=reports)
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-port=0",
        f"--user-data-dir={tmp_path}/x",
    ]
    offline = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/{PAGES[0]}"
        browser = subprocess.Popen([BROWSER, *flags, offline, url], stderr=subprocess.DEVNULL)
        try:
            seen = [reports.get(timeout=60) for _ in PAGES]
        finally:
            browser.terminate()
            browser.wait(timeout=30)
            server.shutdown()
    assert [report["errors"] for report in seen] == [[]] * len(PAGES)
    assert len(seen[0]["images"]) > 0
    assert all(width > 0 for report in seen for width in report["images"]), "an image did not load"
    assert any("reference/settings" in link for link in seen[0]["found"]), "the search does not find a setting"
    assert [report["title"] for report in seen] == ["jppo", "Train - jppo", "Settings - jppo", "Notes - jppo"]
