"""Tests the documentation site in a browser: pages, links and search work without other servers, also from files."""

import http.server
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
from browser import PROGRAM, Browser, is_local

ROOT = Path(__file__).parent.parent
# Waits for the images of a page; returns its title, the widths of its images, its ids and its links.
READ = """(async () => {
  const decode = image => image.decode().catch(() => {});
  await Promise.all([...document.images].map(decode));
  return {
    title: document.title,
    images: [...document.images].map(image => [image.src, image.naturalWidth]),
    ids: [...document.querySelectorAll("[id]")].map(element => element.id),
    links: [...document.querySelectorAll("a[href]")].map(link => link.href),
    longest_signature: Math.max(0, ...[...document.querySelectorAll(".doc-signature code")]
      .flatMap(code => code.textContent.split("\\n").map(line => line.length))),
  };
})()"""
SEARCH = """(async () => {
  const found = () => [...document.querySelectorAll("a.md-search-result__link")].map(link => link.href);
  for (let i = 0; i < 200 && !found().length; i++) await new Promise(end => setTimeout(end, 50));
  return found();
})()"""


class Server(http.server.SimpleHTTPRequestHandler):
    """Serves the site without a log."""

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Builds the site and returns its folder."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, timeout=120)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="no Chromium on the PATH: apt-get install chromium")
def test_site_works_in_a_browser(site, tmp_path):
    names = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    assert len(names) > 50
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=site)) as server,
        Browser(tmp_path / "profile") as browser,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        visits = {name: browser.visit(f"{address}/{name}", READ) for name in names}
        search = browser.visit(f"{address}/index.html?q=recurrent", SEARCH)
        search_in_files = browser.visit(f"{site.as_uri()}/index.html?q=recurrent", SEARCH)
        server.shutdown()
    for name, visit in [*visits.items(), ("the search", search), ("the search in files", search_in_files)]:
        assert visit.errors == [], name
        assert [url for url in visit.requests if not is_local(url)] == [], name
    images = [image for visit in visits.values() for image in visit.value["images"]]
    assert images
    assert [url for url, width in images if width == 0] == [], "these images did not load"
    for found in (search.value, search_in_files.value):
        assert any("recurrence_and_masks" in link for link in found), found
    assert visits["index.html"].value["title"] == "jppo"
    assert visits["reference/training.html"].value["longest_signature"] < 100
    check_links(address, {name: visit.value for name, visit in visits.items()}, site)


def check_links(address, pages, site):
    """Fails if a link leads to no page or file of the site, or to no element of its page."""
    broken = []
    for name, page in pages.items():
        for link in page["links"]:
            url, anchor = urldefrag(link)
            if not url.startswith(address):
                continue
            target = unquote(urlsplit(url).path).lstrip("/") or "index.html"
            if (anchor and target in pages and unquote(anchor) not in pages[target]["ids"]) or not (
                site / target
            ).is_file():
                broken.append(f"{name}: {link}")
    assert broken == []
