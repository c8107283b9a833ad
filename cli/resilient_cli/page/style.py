"""How the page looks, in light and in dark."""

from __future__ import annotations

from resilient.accounting.timeline import Spent

COLOURS = {
    Spent.TRAINING: "#2e9e5b",
    Spent.LOST: "#d64545",
    Spent.EVALUATION: "#3f7fd0",
    Spent.SAVE_STALL: "#d99a1c",
    Spent.RESTORE: "#8f62c9",
    Spent.START: "#5aa9b8",
    Spent.RENDEZVOUS: "#b06c3b",
    Spent.DETECT: "#e0679e",
    Spent.TEARDOWN: "#7a4a4a",
    Spent.WAIT: "#a8a04a",
    Spent.FINISH: "#74859c",
    Spent.DOWN: "#b9bcc2",
}

_BASE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1d2430;--dim:#667085;--line:#e3e6eb;--card:#f6f7f9;
--a:#1f5fbf;--b:#0f8a8a;--gone:#b4b8c0;--fault:#d64545;--bad:#b42318}
@media(prefers-color-scheme:dark){:root{--bg:#12151b;--fg:#e4e7ec;--dim:#98a2b3;--line:#2b313c;
--card:#1a1f27;--a:#7aaeff;--b:#4fd0c8;--gone:#565d69;--fault:#ff7b72;--bad:#ff9a92}}
*{box-sizing:border-box}body{margin:0 auto;padding:28px 20px 60px;max-width:1080px;
background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
h1{font-size:22px;margin:0}h2{font-size:16px;margin:34px 0 10px}p{color:var(--dim);margin:2px 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;
margin:20px 0 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 14px}
.tile b{display:block;font-size:22px;font-weight:600;font-variant-numeric:tabular-nums}
.tile span{color:var(--dim);font-size:13px}
.bar{display:flex;height:22px;margin-bottom:8px;border-radius:5px;overflow:hidden;background:var(--card)}
.bar i{display:block}.scroll{overflow-x:auto}.scroll+.scroll,.scroll+p{margin-top:18px}
.scroll:focus-visible{outline:2px solid var(--a);outline-offset:3px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:14px}
th,td{text-align:left;padding:5px 14px 5px 0;border-bottom:1px solid var(--line);
vertical-align:top}
th{color:var(--dim);font-weight:500;white-space:nowrap}
td.n,th.n{text-align:right;white-space:nowrap}
.dot{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:8px}
svg{width:100%;min-width:820px;height:auto;display:block}svg text{font-size:11px;fill:var(--dim)}
.name{text-anchor:end}.tick{text-anchor:middle}.grid{stroke:var(--line);fill:none}
.fault{fill:var(--fault)}.strike{stroke:var(--fault);stroke-dasharray:2 3;opacity:.55}
.saved{stroke:var(--bg);stroke-width:1.5}
polyline{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
.s-damaged{color:var(--bad);font-weight:600}.s-warning{font-weight:600}
#live{position:fixed;right:12px;bottom:10px;padding:2px 10px;border:1px solid var(--line);
border-radius:12px;background:var(--card);font-size:13px}
.one{stroke-width:6}.k1{stroke:var(--a)}.k0{stroke:var(--b)}.gone{stroke:var(--gone);stroke-width:2.4}
"""


def style() -> str:
    """Return the page's style sheet."""
    fills = "".join(
        f".c-{kind.value}{{fill:{colour};background:{colour}}}" for kind, colour in COLOURS.items()
    )
    return " ".join(_BASE.split("\n")) + fills
