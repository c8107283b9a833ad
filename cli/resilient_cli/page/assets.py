"""Style sheet, script and content security policy of the page.

The page has all its content without the script. The script shows one part at a time, sorts,
searches and opens rows. On a served page it also requests slow parts and renews changed ones.
It receives HTML only from the code that makes the page, which escapes every name.
"""

from __future__ import annotations

import base64
import hashlib
from html import escape

from resilient.goodput.timeline import TimeClass

_SCRIPT = """
(() => {
const all = (what, of = document) => [...of.querySelectorAll(what)];
const named = (name) => document.getElementById(name);
const pause = (ms) => new Promise((done) => setTimeout(done, ms));
document.documentElement.classList.add("js");

const valueOf = (body, nth) => {
  const cell = body.rows[0].cells[nth];
  return cell.dataset.value === undefined ? cell.textContent : parseFloat(cell.dataset.value);
};
const apart = (one, other, turn) => {
  if (typeof one === "number" && typeof other === "number") return turn * (one - other);
  if (typeof one === "number") return -1;
  if (typeof other === "number") return 1;
  return turn * one.localeCompare(other, "en", {numeric: true});
};
const sort = (table, head, nth) => {
  const bodies = [...table.tBodies];
  const isNumber = bodies.some((body) => typeof valueOf(body, nth) === "number");
  const was = head.getAttribute("aria-sort");
  const rises = was ? was === "descending" : !isNumber;
  all("th[aria-sort]", table).forEach((one) => one.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", rises ? "ascending" : "descending");
  const keyed = bodies.map((body) => [valueOf(body, nth), body]);
  keyed.sort((one, other) => apart(one[0], other[0], rises ? 1 : -1));
  table.append(...keyed.map((one) => one[1]));
};
const matcher = (text) => {
  const wanted = text.trim().toLowerCase();
  if (!/[*?]/.test(wanted)) return (name) => name.includes(wanted);
  const words = wanted.replace(/[.+^${}()|[\\]\\\\]/g, "\\\\$&");
  const whole = new RegExp("^" + words.replace(/\\*/g, ".*").replace(/\\?/g, ".") + "$");
  return (name) => whole.test(name);
};
const sift = (name) => {
  const tool = (what) => document.querySelector(`.tools [data-${what}="${name}"]`);
  const [find, part, only] = ["find", "part", "only"].map(tool);
  const fits = matcher(find.value);
  let shown = 0;
  const bodies = [...named(name).tBodies];
  for (const body of bodies) {
    const isShown = fits(body.rows[0].cells[0].textContent.toLowerCase())
      && (!part || !part.value || body.dataset.part === part.value)
      && (!only || !only.checked || body.dataset.same === undefined);
    body.hidden = !isShown;
    shown += isShown;
  }
  named(`${name}-count`).textContent = `${shown} of ${bodies.length}`;
};
const ready = (of) => {
  for (const table of all("table[data-sorted]", of)) {
    all("thead th", table).forEach((head, nth) => {
      const button = document.createElement("button");
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => sort(table, head, nth));
    });
  }
};

const say = (room, text) => {
  const said = room.querySelector(":scope > .busy") || document.createElement("p");
  if (!said.isConnected) {
    said.className = "busy";
    said.setAttribute("role", "status");
    room.replaceChildren(said);
  }
  said.textContent = text;
};
const load = async (room, address) => {
  const turn = room.turn = (room.turn || 0) + 1;
  room.setAttribute("aria-busy", "true");
  say(room, "reading");
  for (let wait = 60; ; wait = Math.min(500, 2 * wait)) {
    let answer, text = "not served any more";
    try {
      answer = await fetch(address, {cache: "no-store"});
      text = await answer.text();
    } catch { answer = undefined; }
    if (room.turn !== turn) return;
    if (answer && answer.ok && answer.status !== 202) {
      room.innerHTML = text;
      ready(room);
    } else say(room, text.trim());
    if (!answer || answer.status !== 202) break;
    await pause(wait);
  }
  room.removeAttribute("aria-busy");
};
const ask = (name, room, address) => {
  if (room.address === address) return;
  room.address = address;
  load(room, address);
};
const query = (fields) => new URLSearchParams(fields).toString();

const views = all("section.view");
let shown = "";
const route = () => {
  let words = [];
  try { words = decodeURIComponent(location.hash.slice(1)).split("/"); } catch { words = [""]; }
  const chosen = views.find((one) => one.id === words[0]) || (shown ? null : views[0]);
  if (!chosen) return;
  for (const one of views) one.hidden = one !== chosen;
  for (const one of all("nav a")) {
    if (one.hash === `#${chosen.id}`) one.setAttribute("aria-current", "page");
    else one.removeAttribute("aria-current");
  }
  if (shown && shown !== chosen.id) {
    const head = chosen.querySelector("h2");
    head.focus({preventScroll: true});
    scrollTo(0, 0);
  }
  shown = chosen.id;
  const of = named("of"), one = named("a"), other = named("b");
  if (shown === "tensors" && of) {
    if (words[1]) of.value = words[1];
    if (of.value) ask("tensors", named("tensors-room"), `tensors?${query({of: of.value})}`);
  }
  if (shown === "compare" && one && words[2]) {
    [one.value, other.value] = [words[1], words[2]];
    if (one.value && other.value) {
      const pair = query({a: one.value, b: other.value});
      ask("compare", named("compare-room"), `compare?${pair}`);
    }
  }
};

document.addEventListener("click", (event) => {
  const opened = event.target.closest("button.open");
  if (opened) {
    const row = named(opened.getAttribute("aria-controls")), room = row.querySelector("div");
    row.hidden = !row.hidden;
    opened.setAttribute("aria-expanded", String(!row.hidden));
    if (row.hidden && room.hasAttribute("aria-busy")) {
      room.turn += 1;
      room.removeAttribute("aria-busy");
      room.address = undefined;
    } else if (!row.hidden && room.dataset.load) ask("detail", room, room.dataset.load);
  }
  const verify = event.target.closest("button[data-verify]");
  if (verify) {
    const room = named("verify-room");
    load(room, `verify?${query({of: verify.dataset.verify})}`);
    room.scrollIntoView({block: "nearest"});
  }
});
const changed = (event) => {
  const data = event.target.dataset || {};
  const name = data.find || data.part || data.only;
  if (name) sift(name);
};
document.addEventListener("input", changed);
document.addEventListener("change", (event) => {
  changed(event);
  if (event.target.id === "of") location.hash = `tensors/${event.target.value}`;
});
document.addEventListener("submit", (event) => {
  event.preventDefault();
  const hash = `#compare/${named("a").value}/${named("b").value}`;
  if (location.hash === hash) route(); else location.hash = hash;
});
addEventListener("hashchange", route);
// As it came: what the script adds is not what a newer page is held against.
const kept = new Map(all("[data-live]").map((one) => [one.id, one.innerHTML]));
ready(document);
route();

const meta = document.querySelector("meta[name=version]");
if (!meta) return;
let version = meta.content;
const renew = async () => {
  const answer = await fetch("", {cache: "no-store"});
  if (!answer.ok) throw new Error(answer.status);
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const old of all("[data-live]")) {
    const now = page.getElementById(old.id);
    if (!now || kept.get(old.id) === now.innerHTML) continue;
    kept.set(old.id, now.innerHTML);
    const value = old.value, moved = all(".scroll", old).map((one) => one.scrollLeft);
    const focusable = () => all("a,button,input,select,.scroll", old);
    const focused = focusable().indexOf(document.activeElement);
    old.innerHTML = now.innerHTML;
    if (old.tagName === "SELECT") old.value = value;
    all(".scroll", old).forEach((one, nth) => { one.scrollLeft = moved[nth] || 0; });
    if (focused >= 0) (focusable()[focused] || old).focus({preventScroll: true});
    ready(old);
  }
  version = page.querySelector("meta[name=version]").content;
};
const said = named("live");
const look = async () => {
  try {
    const answer = await fetch("version", {cache: "no-store"});
    if (!answer.ok) throw new Error(answer.status);
    if ((await answer.text()) !== version) await renew();
    said.textContent = "live";
  } catch { said.textContent = "not served any more: this is the last that was seen"; }
  setTimeout(look, 1000);
};
setTimeout(look, 1000);
})();
"""
_DIGEST = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()

_RULES = (
    "default-src 'none'; style-src 'unsafe-inline'; "
    f"script-src 'sha256-{_DIGEST}'; base-uri 'none'; form-action 'none'"
)
POLICY = f"{_RULES}; connect-src 'self'; frame-ancestors 'none'"
"""Content security policy of a served page: the one script by its digest, and no other host."""


def head_of(version: str) -> str:
    """Return the elements for the head of a page.

    Args:
        version: Version of a served page, which checks for a newer one. Empty for a page in a
            file, which must not make requests.
    """
    if version:
        return f'<meta name="version" content="{escape(version)}">'
    return f'<meta http-equiv="Content-Security-Policy" content="{_RULES}">'


def foot_of(version: str) -> str:
    """Return the end of the body: the live mark of a served page, and the script."""
    live = '<p id="live" role="status">live</p>' if version else ""
    return f"{live}<script>{_SCRIPT}</script>"


COLOURS = {
    TimeClass.TRAINING: "#2e9e5b",
    TimeClass.LOST: "#d64545",
    TimeClass.EVALUATION: "#3f7fd0",
    TimeClass.SAVE_STALL: "#d99a1c",
    TimeClass.RESTORE: "#8f62c9",
    TimeClass.START: "#5aa9b8",
    TimeClass.RENDEZVOUS: "#b06c3b",
    TimeClass.DETECT: "#e0679e",
    TimeClass.TEARDOWN: "#7a4a4a",
    TimeClass.WAIT: "#a8a04a",
    TimeClass.FINISH: "#74859c",
    TimeClass.DOWN: "#b9bcc2",
}

_BASE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1d2430;--dim:#5d6779;--line:#e3e6eb;--card:#f6f7f9;
--a:#1f5fbf;--b:#0f8a8a;--warm:#b8500f;--soft:#9dbdee;--gone:#b4b8c0;--fault:#d64545;--bad:#b42318;
--good:#17714a;--good-bg:#e9f6ef;--bad-bg:#fdeeec}
@media(prefers-color-scheme:dark){:root{--bg:#12151b;--fg:#e4e7ec;--dim:#9aa5b5;--line:#2b313c;
--card:#1a1f27;--a:#7aaeff;--b:#4fd0c8;--warm:#ffa866;--soft:#35507c;--gone:#565d69;--fault:#ff7b72;
--bad:#ff9a92;--good:#6fd3a0;--good-bg:#14291f;--bad-bg:#331a1a}}
*{box-sizing:border-box}html{scroll-padding:130px 0 60px}[hidden]{display:none!important}
body{margin:0 auto;padding:0 20px 70px;max-width:1120px;
background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
h1{font-size:22px;line-height:1.3;margin:0;overflow-wrap:anywhere}
h2.top{font-size:18px;margin:26px 0 8px;outline:0}h3{font-size:15px;margin:34px 0 8px}
p{color:var(--dim);margin:2px 0;overflow-wrap:anywhere}p strong{color:var(--fg)}
ul{color:var(--dim);margin:6px 0;padding-left:20px}li{overflow-wrap:anywhere}
code,.path{font-family:ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace;font-size:13px}
:focus-visible{outline:2px solid var(--a);outline-offset:2px;border-radius:3px}main{outline:0}
.skip{position:absolute;left:-999px}.skip:focus{position:fixed;left:12px;top:8px;z-index:3;
padding:6px 12px;background:var(--card);color:var(--fg);border:1px solid var(--line)}
header{position:sticky;top:0;z-index:2;margin:0 -20px;padding:18px 20px 0;background:var(--bg);
border-bottom:1px solid var(--line)}header>div{padding-bottom:12px}
nav{display:flex;gap:4px;flex-wrap:wrap}
nav a{padding:7px 14px;color:var(--dim);text-decoration:none;border-bottom:2px solid transparent;
margin-bottom:-1px}nav a:hover{color:var(--fg)}
nav a[aria-current]{color:var(--fg);border-color:var(--a);font-weight:600}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;
margin:16px 0 18px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 14px}
.tile b{display:block;font-size:22px;font-weight:600;font-variant-numeric:tabular-nums}
.tile span{color:var(--dim);font-size:13px}
.bar{display:flex;height:22px;margin-bottom:8px;border-radius:5px;overflow:hidden;background:var(--card)}
.bar i{display:block}.scroll{overflow-x:auto}.scroll+.scroll,.scroll+p{margin-top:18px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:14px}
caption{position:absolute;left:-9999px}
th,td{text-align:left;padding:5px 14px 5px 0;border-bottom:1px solid var(--line);
vertical-align:top}tr>:last-child{padding-right:2px}
th{color:var(--dim);font-weight:500;white-space:nowrap}
td.n,th.n{text-align:right;white-space:nowrap}
tbody th{color:var(--fg);font-weight:400;white-space:normal;overflow-wrap:anywhere;min-width:200px}
thead th button{all:unset;cursor:pointer;color:var(--dim)}
thead th button:hover{color:var(--fg)}thead th button:focus-visible{outline:2px solid var(--a)}
th[aria-sort] button{color:var(--fg);font-weight:600}
th[aria-sort=ascending] button::after{content:" \\2191"}
th[aria-sort=descending] button::after{content:" \\2193"}
button.open{all:unset;cursor:pointer;display:block;padding-left:18px;position:relative}
button.open::before{content:"";position:absolute;left:2px;top:7px;border:5px solid transparent;
border-left-color:var(--dim);border-right-width:0}
button.open[aria-expanded=true]::before{transform:rotate(90deg)}
button.open:hover{color:var(--a)}button.open:focus-visible{outline:2px solid var(--a)}
tr.detail>td{padding:6px 0 18px 18px;background:var(--card)}
.tools{display:flex;flex-wrap:wrap;gap:10px 18px;align-items:center;margin:10px 0 12px}
.tools label{color:var(--dim);font-size:14px}
input[type=search],select,.act,.links button{font:inherit;font-size:14px;color:var(--fg);
background:var(--card);border:1px solid var(--line);border-radius:6px;padding:5px 9px;
max-width:100%}
input[type=search]{width:200px;margin-left:4px}select{margin-left:4px}
input::placeholder{color:var(--dim);opacity:1}
.act{background:var(--a);border-color:var(--a);color:var(--bg);padding:6px 18px;cursor:pointer}
.links{white-space:nowrap}.links a{color:var(--a)}
.links button{padding:0 8px;margin-left:6px;cursor:pointer;font-size:13px}
.count{color:var(--dim);font-size:13px}
.room{margin-top:14px}.busy{padding:12px 0}
.verdict{padding:10px 14px;border-radius:8px;margin:10px 0;color:var(--fg)}
.v-same{background:var(--good-bg);border:1px solid var(--good)}
.v-differ{background:var(--bad-bg);border:1px solid var(--bad)}
.bad{color:var(--bad)}.badge{display:inline-block;padding:0 7px;border-radius:9px;font-size:12px;
background:var(--good-bg);color:var(--good);border:1px solid var(--good)}
.dot{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:8px}
.legend{display:flex;flex-wrap:wrap;align-items:center;font-size:13px;margin:8px 0}
.legend span{display:flex;align-items:center;margin-right:18px}.legend .dot{margin:0 7px 0 0}
.where{display:inline-block;min-width:120px;overflow-wrap:anywhere}
.one-line{white-space:nowrap}
svg{width:100%;min-width:820px;height:auto;display:block}svg text{font-size:11px;fill:var(--dim)}
.name{text-anchor:end}.tick{text-anchor:middle}.grid{stroke:var(--line);fill:none}
.fault{fill:var(--fault)}.strike{stroke:var(--fault);stroke-dasharray:2 3;opacity:.55}
.saved{stroke:var(--bg);stroke-width:1.5}
polyline{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
.s-damaged{color:var(--bad);font-weight:600}.s-warning{font-weight:600}
svg.tree{margin:6px 0 18px}.tree .line{stroke:var(--dim);stroke-width:1.6;fill:none;opacity:.6}
.tree .branch{stroke-dasharray:4 3}.tree .begun{stroke:var(--dim);stroke-width:2}
.tree text.lane{fill:var(--fg);font-weight:600}.tree text.tag{fill:var(--warm);font-weight:600}
.tree text{paint-order:stroke;stroke:var(--bg);stroke-width:3px}
.node{fill:var(--a);stroke:var(--bg);stroke-width:1.5}
.n-abandoned .node{fill:var(--bg);stroke:var(--dim);stroke-width:2}
.n-warning .node{fill:var(--warm)}.next{fill:none;stroke:var(--good);stroke-width:2.5}
.broken{stroke:var(--fault);stroke-width:3.2;fill:none}
i.node{border-radius:50%;background:var(--a)}
i.next{border-radius:50%;border:2.5px solid var(--good)}
i.abandoned{border-radius:50%;border:2px solid var(--dim)}
i.broken{background:linear-gradient(45deg,transparent 40%,var(--fault) 40% 60%,transparent 60%),
linear-gradient(-45deg,transparent 40%,var(--fault) 40% 60%,transparent 60%)}
.own{fill:var(--a);background:var(--a)}.shared{fill:var(--soft);background:var(--soft)}
.p-model{fill:var(--a);background:var(--a)}.p-optimizer{fill:var(--b);background:var(--b)}
rect.broken{fill:var(--fault);stroke:none}.layers text,.sizes text{fill:var(--fg)}
.layers text.tick{fill:var(--dim)}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(360px,100%),1fr));gap:14px}
figure{margin:8px 0 0;min-width:0}figcaption{font-size:13px;color:var(--dim)}
figcaption b{color:var(--fg);font-weight:600;margin-right:6px}svg.small{min-width:0;max-width:640px}
.h-a{fill:var(--a);background:var(--a)}.h-b{fill:var(--warm);background:var(--warm)}
svg .h-a+.h-b{fill-opacity:.35;stroke:var(--warm);stroke-width:1.2}
.facts+.facts{margin-top:6px}.facts{display:flex;flex-wrap:wrap;gap:6px 26px;margin:10px 0 0}
.facts dt{color:var(--dim);font-size:12px}.facts dd{margin:0;font-size:14px}
table.numbers{width:auto;margin-top:10px;background:none}table.numbers th{min-width:0}
table.numbers tbody th{color:var(--dim);white-space:nowrap}
table.numbers th,table.numbers td{padding:2px 24px 2px 0}
#live{position:fixed;right:12px;bottom:10px;padding:2px 10px;border:1px solid var(--line);
border-radius:12px;background:var(--card);font-size:13px}
.one{stroke-width:6}.k1{stroke:var(--a)}.k0{stroke:var(--b)}.gone{stroke:var(--gone);stroke-width:2.4}
@media(max-width:640px){nav{gap:0}nav a{padding:7px 9px}
table.numbers :is(th,td){padding-right:10px!important;font-size:13px}
html{scroll-padding-top:10px}
svg.small text{font-size:14px}
header{position:static}tbody th{min-width:150px}
tr.detail>td>div{max-width:calc(100vw - 60px);position:sticky;left:0}}
@media print{header{position:static}.tools,nav,#live,.skip{display:none}}
"""


def style() -> str:
    """Return the style sheet of the page."""
    fills = "".join(
        f".c-{kind.value}{{fill:{colour};background:{colour}}}" for kind, colour in COLOURS.items()
    )
    return " ".join(_BASE.split("\n")) + fills
