"""The daemon's page `/`: the content of `canaryd status` as one HTML document.

It has no script and fetches nothing, and reloads itself. The daemon gathers its content at least every half minute.
"""

from __future__ import annotations

import html
import socket
from collections.abc import Iterable
from datetime import datetime, timezone

from canaryd.facts import printable
from canaryd.formatting import format_time, time_zone
from canaryd.judge.incidents import Incident, incidents
from canaryd.model import Device, Finding, State
from canaryd.report.advice import advised, answer, drills, steps
from canaryd.report.events import describe_ack, describe_events
from canaryd.report.incidents import Step, awaits_tests, describe, next_step, sentence, shown_notes, step
from canaryd.report.status import DeviceStatus, Newest, Status, ago, newest_of
from canaryd.report.terminal import cause_words, rival_words, rule_words, typed, verdict_note

CONTENT_TYPE = "text/html; charset=utf-8"
"""Media type of what `render` returns."""
RELOAD = 30
"""Seconds after which a browser reloads the page."""

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --card: #f6f7f9; --ink: #1b1f24; --faint: #57606a; --line: #d0d7de;
  --healthy: #116329; --degraded: #8a5a00; --unknown: #57606a; --suspect: #a33c00; --faulty: #b3001b; }
@media (prefers-color-scheme: dark) { :root { --paper: #0d1117; --card: #161b22; --ink: #e6edf3; --faint: #9aa4af;
  --line: #30363d; --healthy: #56d364; --degraded: #e3b341; --unknown: #a8b1bb; --suspect: #ff9b5e;
  --faulty: #ff7b72; } }
* { box-sizing: border-box; margin: 0; } html { font-size: clamp(100%, .5rem + .55vw, 160%); }
body { margin: 0 auto; max-width: 75rem; padding: .6rem 1rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.4 system-ui, sans-serif; overflow-wrap: anywhere; }
.healthy { --mark: var(--healthy); } .degraded { --mark: var(--degraded); } .unknown { --mark: var(--unknown); }
.suspect { --mark: var(--suspect); } .faulty { --mark: var(--faulty); }
svg { height: 1em; width: 1em; vertical-align: -.12em; fill: var(--mark); } .ink { stroke: var(--paper); fill: none; }
.state { color: var(--mark); font-weight: 700; text-transform: uppercase; white-space: nowrap; }
header { border-left: .75rem solid var(--mark); padding: .2rem 0 .2rem 1rem; margin-bottom: .5rem; }
h1 { font-size: clamp(1.8rem, 5vw, 2.6rem); line-height: 1.15; } h2 { font-size: 1.1rem; margin: .5rem 0 .4rem; }
.answer { font-weight: 600; font-size: 1.2rem; line-height: 1.3; } .advice { font-size: 1.1rem; margin-top: .3rem; }
.cards { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); }
.cards.wide { grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }
article, .problems { background: var(--card); border: 1px solid var(--line); padding: .45rem .7rem; min-width: 0;
  border-left: .4rem solid var(--mark, var(--degraded)); border-radius: .3rem; }
h3 { font-size: 1.1rem; } h3, .incident { margin-top: .2rem; } h4 { margin-top: .7rem; }
small { font-weight: 400; display: inline-block; }
.faint, small, summary, footer, .notes { color: var(--faint); font-size: .9rem; } details { margin-top: .4rem; }
ul { padding-left: 1.2rem; } li { margin: .2rem 0; } .findings { list-style: none; padding: 0; }
.findings > li { border-top: 1px solid var(--line); margin-top: .6rem; padding-top: .5rem; }
code { font: .9em ui-monospace, monospace; background: var(--paper); border: 1px solid var(--line); padding: 0 .3rem; }
table { border-collapse: collapse; font-size: .9rem; }
td, th { text-align: left; font-weight: 400; padding: 0 1rem 0 0; }
footer { margin-top: 1.5rem; border-top: 1px solid var(--line); padding-top: .6rem; } a { color: inherit; }
@media print { article { break-inside: avoid; } h2 { break-after: avoid; } }
"""

SHAPES = {
    State.HEALTHY: '<circle cx="12" cy="12" r="11"/><path d="M6 12l4 5 8-9" stroke-width="3" class="ink"/>',
    State.DEGRADED: '<path d="M12 1L24 23H0z"/><path d="M12 9v6m0 2v3" stroke-width="3" class="ink"/>',
    State.UNKNOWN: '<path d="M12 1a11 11 0 100 22 11 11 0 000-22zm0 3.5a7.5 7.5 0 110 15 7.5 7.5 0 010-15z"/>',
    State.SUSPECT: '<path d="M12 0l12 12-12 12L0 12z"/>',
    State.FAULTY: '<path d="M7 0h10l7 7v10l-7 7H7l-7-7V7z"/>'
    '<path d="M7 7l10 10M17 7L7 17" stroke-width="3" class="ink"/>',
}
"""State → SVG shape, 24 by 24 units, for readers who cannot see colours."""


def render(status: Status) -> bytes:
    """Return the page of a status."""
    state, host = status.state, socket.gethostname()
    bad = [d for d in status.devices if d.verdict.state is not State.HEALTHY]
    healthy = [d for d in status.devices if d.verdict.state is State.HEALTHY]
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="refresh" content="{RELOAD}"><link rel="icon" href="data:,">
<title>{state.value.upper()} · {_text(host)} · canaryd</title><style>{STYLE}</style></head><body>
<header class="{state.value}"><p class="faint">canaryd on {_text(host)}</p><h1>{_state(state)}</h1>
<p class="answer">{_text(answer(status))}</p>
<p class="advice"><strong>Do now:</strong> {_html(steps(status))}</p></header>
{_problems(status)}<main>
{_section("Not healthy", bad, status, "cards wide")}
{_section("Healthy", healthy, status, "cards")}
</main><footer>{_untested(status)}
<p>The daemon is {"" if status.daemon else "not "}running. Times are {time_zone()}. This is the state at
{_time(status.now)}; the page reloads itself every {RELOAD} seconds. The same facts:
<code>{_text("canaryd status -v")}</code>, <code>{_text("canaryd status --json")}</code>; for Prometheus:
<a href="/metrics">/metrics</a>.</p>
</footer>
</body></html>
"""
    return page.encode()


def _text(text: object) -> str:
    """Return a text as HTML, with whole commands. Control characters, as in a device's name, become "?"."""
    return html.escape("\n".join(map(printable, typed(str(text)).split("\n"))))


def _items(texts: Iterable[object]) -> str:
    """Return texts as an HTML list, or "" if there are none."""
    items = "".join(f"<li>{_text(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def _html(todo: Iterable[Step]) -> str:
    """Return the steps as HTML, each command on its own line, so that it can be copied."""
    escaped = ((_text(each.text), html.escape(printable(each.shown))) for each in todo if each.text)
    return " ".join(f"{text}<br><code>{command}</code><br>" if command else text for text, command in escaped)


def _untested(status: Status) -> str:
    """Return HTML about what was not tested; a click shows how to test it. Return "" if nothing has been tested yet."""
    what = ", ".join(gap.what for gap in status.not_tested)
    return f"<details><summary>Not tested: {_text(what)}</summary>{_items(status.not_tested)}</details>" if what else ""


def _problems(status: Status) -> str:
    lines = [*status.problems, *drills(status)]
    if status.released_until:
        until = format_time(status.released_until)
        lines.append(f"devices are released until {until} (canaryd release): nothing is tested")
    return f'<section class="problems"><h2>About canaryd itself</h2>{_items(lines)}</section>' if lines else ""


def _section(title: str, devices: Iterable[DeviceStatus], status: Status, kind: str) -> str:
    covered = advised(status)
    cards = "\n".join(_card(d, status.now, advised=d.device.uuid in covered) for d in devices)
    return f'<h2>{title}</h2><div class="{kind}">{cards}</div>' if cards else ""


def _card(d: DeviceStatus, now: float, *, advised: bool) -> str:
    """Return the HTML for a device: its incidents; a click shows findings, events and the age of the newest results.

    `advised`: the top of the page already says what to do about the worst incident.
    """
    verdict, device, found = d.verdict, d.device, incidents(d.verdict)
    gone = "" if d.present else " <strong>GONE</strong>"
    began = f", since {_time(found[0].since, seconds=False)}" if found else ""
    said = "".join(_incident(i, device, advised=advised and not n) for n, i in enumerate(found))
    notes = "".join(f'<p class="faint">{_text(sentence(f.message))}</p>' for f in shown_notes(verdict))
    since = f"{_text(verdict_note(verdict))} since {_time(verdict.since)} ({ago(verdict.since, now)})"
    oldest = f"oldest test: {_text(d.stalest[0])}, {ago(d.stalest[1], now)}" if d.stalest else "no test has run yet"
    rules = "".join(map(_findings, found))
    faint = "".join(_finding(f) for f in verdict.findings if f.state is State.HEALTHY)
    events = _items(reversed(describe_events(d.events)))
    return f"""<article class="{verdict.state.value}">
<h3>{_state(verdict.state)} {_text(device.name)}{gone} <small>{_text(device.model)}{began}</small></h3>
{said}{notes}{_items(map(describe_ack, d.acks_to_show))}
<details><summary>Details; {oldest}</summary>
<p class="faint">{_text(device.uuid)}<br>{since}, judged {ago(verdict.decided, now)}</p>
{f'<ul class="findings">{rules}</ul>' if rules else ""}{f'<ul class="findings notes">{faint}</ul>' if faint else ""}
{f"<h4>In the last day, newest first</h4>{events}" if events else ""}{_evidence(newest_of([d]), now)}
</details></article>"""


def _incident(incident: Incident, device: Device, *, advised: bool) -> str:
    """Return an incident as one HTML paragraph. `advised`: the top of the page already says what to do about it."""
    todo = "" if advised else _html([step(incident, device), next_step(incident, device)])
    action = f"<br><strong>Do now:</strong> {todo}" if todo else ""
    silent = incident.wrong is not None or awaits_tests(incident)
    cause = "" if silent else f'<span class="faint">({_text(cause_words(incident.cause))})</span>'
    return f'<p class="incident {incident.state.value}">{_text(describe(incident))} {cause}{action}</p>'


def _findings(incident: Incident) -> str:
    """Return what each rule says of an incident as HTML, and how to repeat the test."""
    repeat = f"<li>To repeat the test: <code>{_text(incident.repeat)}</code></li>" if incident.repeat else ""
    return "".join(map(_finding, incident.findings)) + repeat


def _finding(finding: Finding) -> str:
    return "".join(
        [
            f'<li class="{finding.state.value}">{_text(rule_words(finding))}: {_text(finding.message)}',
            f"<p><strong>Do now:</strong> {_text(finding.action)}</p>" if finding.action else "",
            _items(finding.evidence),
            f"<p>Other explanations:</p>{_items(map(rival_words, finding.rivals))}" if finding.rivals else "",
            f'<p class="faint">Runs: {_text(", ".join(finding.runs))}</p></li>' if finding.runs else "</li>",
        ]
    )


def _evidence(newest: Newest, now: float) -> str:
    """Return the age of each probe's newest evidence as HTML."""
    rows = "".join(
        f"<tr><th>{_text(probe)}</th><td>{'none yet' if at is None else f'{ago(at, now)}, {_time(at)}'}</td></tr>"
        for probe, at in newest.items()
    )
    return f"<table>{rows}</table>" if rows else ""


def _state(state: State) -> str:
    shape = f'<svg viewBox="0 0 24 24" aria-hidden="true">{SHAPES[state]}</svg>'
    return f'<span class="state {state.value}">{shape} {state.value}</span>'


def _time(at: float, *, seconds: bool = True) -> str:
    exact = datetime.fromtimestamp(at, tz=timezone.utc).isoformat(timespec="seconds")
    return f'<time datetime="{exact}">{format_time(at, seconds=seconds)}</time>'
