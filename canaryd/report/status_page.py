"""The daemon's page `/`: what `canaryd status` shows, as one HTML document.

It has no script and fetches nothing. Ages are computed for each request, and it reloads itself.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from datetime import datetime, timezone
from urllib.parse import quote

from canaryd.formatting import format_time, time_zone
from canaryd.judge.incidents import Incident, incidents
from canaryd.model import Device, Finding, State
from canaryd.report import html
from canaryd.report.advice import advised, answer, drills, steps
from canaryd.report.events import describe_ack, describe_events
from canaryd.report.html import escape as _text
from canaryd.report.incidents import Step, awaits_tests, next_step, sentence, shown_notes, step, told
from canaryd.report.status import DeviceStatus, Newest, Status, age, ago, as_of, newest_of
from canaryd.report.terminal import cause_note, rival_words, rule_words, verdict_note

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
* { box-sizing: border-box; } html { font-size: clamp(100%, .5rem + .55vw, 160%); }
body { margin: 0 auto; max-width: 75rem; padding: .6rem 1rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.4 system-ui, sans-serif; overflow-wrap: anywhere; }
h1, h2, h3, p, ul, dl, dd { margin: 0; } ul { padding-left: 1.2rem; } li { margin: .2rem 0; }
.healthy { --mark: var(--healthy); } .degraded { --mark: var(--degraded); } .unknown { --mark: var(--unknown); }
.suspect { --mark: var(--suspect); } .faulty { --mark: var(--faulty); }
svg.shape { height: 1em; width: 1em; vertical-align: -.12em; fill: var(--mark); }
svg.shape .ink { stroke: var(--paper); fill: none; }
.state { color: var(--mark); font-weight: 700; text-transform: uppercase; white-space: nowrap; }
header { border-left: .75rem solid var(--mark); padding: .25rem 0 .25rem 1rem; margin-bottom: .8rem; }
header .host { color: var(--faint); }
h1 { font-size: clamp(1.8rem, 5vw, 2.6rem); line-height: 1.15; }
header .answer { font-weight: 600; font-size: clamp(1.1rem, 2vw, 1.3rem); line-height: 1.3; }
header .advice { font-size: 1.1rem; margin-top: .3rem; }
.cards { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); }
main > h2 { font-size: 1.1rem; margin-bottom: .4rem; }
article { background: var(--card); border: 1px solid var(--line); border-left: .4rem solid var(--mark);
  border-radius: .3rem; padding: .45rem .7rem; min-width: 0; }
.wide { grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }
article h3 { font-size: 1.1rem; display: flex; flex-wrap: wrap; gap: 0 .6rem; align-items: baseline; }
article h3 small { font-weight: 400; font-size: .9rem; color: var(--faint); }
.incident { margin-top: .2rem; }
article h4 { margin: .7rem 0 0; font-size: .95rem; }
.faint, summary, footer { color: var(--faint); font-size: .9rem; }
.loud .finding { border-top: 1px solid var(--line); margin-top: .6rem; padding-top: .5rem; }
.notes { color: var(--faint); font-size: .85rem; } .notes .faint { font-size: inherit; }
.loud .notes .finding { border: 0; margin: .4rem 0; padding: 0; }
.notes .finding p { display: inline; } .notes .finding p::before { content: " · "; }
.finding { list-style: none; } ul.findings { padding: 0; } .finding ul { margin-top: .2rem; }
code { font: .9em ui-monospace, monospace; background: var(--paper); border: 1px solid var(--line);
  border-radius: .2rem; padding: .05rem .3rem; }
details { margin-top: .4rem; } table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; font-weight: 400; padding: 0 1rem 0 0; vertical-align: top; }
.problems { border: 1px solid var(--line); border-left: .4rem solid var(--degraded); border-radius: .3rem;
  padding: .5rem .8rem; margin-bottom: 1rem; }
.problems h2 { font-size: 1.05rem; } main > h2:not(:first-child) { margin-top: .8rem; }
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
"""A shape for each state, 24 by 24, for readers who do not see its colour."""
INKS = {
    State.HEALTHY: "#116329",
    State.DEGRADED: "#8a5a00",
    State.UNKNOWN: "#57606a",
    State.SUSPECT: "#a33c00",
    State.FAULTY: "#b3001b",
}
"""Colours of the icon in the browser's tab, which the style sheet does not reach: those of `STYLE` on white."""


def render(status: Status, now: float) -> bytes:
    """Return the page at the time `now` for a status gathered at `status.now`; both in seconds since the epoch."""
    current = as_of(status, now)
    state, host = current.state, _text(socket.gethostname())
    bad = [d for d in current.devices if d.verdict.state is not State.HEALTHY]
    healthy = [d for d in current.devices if d.verdict.state is State.HEALTHY]
    head = f'<meta http-equiv="refresh" content="{RELOAD}">'
    head += f'<link rel="icon" href="data:image/svg+xml,{quote(_icon(state))}">'
    body = [
        f'<header class="{state.value}"><p class="host">canaryd on {host}</p>',
        f"<h1>{_state(state)}</h1>",
        f'<p class="answer">{_text(answer(current))}</p>',
        f'<p class="advice"><strong>Do now:</strong> {_html(steps(current))}</p></header>',
        *_problems(current),
        "<main>",
        *_section("Not healthy", bad, current, now, wide=True),
        *_section("Healthy", healthy, current, now),
        "</main>",
        f"<footer>{_untested(current)}",
        f"<p>The daemon is {'' if current.daemon else 'not '}running. Times are {time_zone()}.",
        f"Rendered at {_time(now)} from the state at {_time(status.now)}; this page reloads itself every",
        f"{RELOAD} seconds. The same facts: <code>canaryd status -v</code>, <code>canaryd status --json</code>;",
        'for Prometheus: <a href="/metrics">/metrics</a>.</p></footer>',
    ]
    return html.document(f"{state.value.upper()} · {socket.gethostname()} · canaryd", STYLE, body, head=head).encode()


def _html(todo: Iterable[Step]) -> str:
    """Return what to do now, each command on a line of its own, to be copied."""
    told = ((_text(each.text), _text(each.command)) for each in todo if each.text)
    return " ".join(f"{text}<br><code>{command}</code><br>" if command else text for text, command in told)


def _untested(status: Status) -> str:
    """Return what was not tested, with how to test it behind a click; "" where nothing was tested yet."""
    if not status.not_tested:
        return ""
    listed = "".join(f"<li>{_text(str(gap))}</li>" for gap in status.not_tested)
    what = ", ".join(gap.what for gap in status.not_tested)
    return f"<details><summary>Not tested: {_text(what)}</summary><ul>{listed}</ul></details>"


def _problems(status: Status) -> list[str]:
    lines = [*status.problems, *drills(status)]
    if status.released_until:
        until = format_time(status.released_until)
        lines.append(f"devices are released until {until} (canaryd release): nothing is tested")
    if not lines:
        return []
    listed = "".join(f"<li>{_text(line)}</li>" for line in lines)
    return [f'<section class="problems"><h2>About canaryd itself</h2><ul>{listed}</ul></section>']


def _section(
    title: str, devices: Iterable[DeviceStatus], status: Status, now: float, *, wide: bool = False
) -> list[str]:
    told_of = advised(status)
    cards = [_card(d, now, advised=d.device.uuid in told_of) for d in devices]
    return [f"<h2>{title}</h2>", f'<div class="cards{" wide" * wide}">', *cards, "</div>"] if cards else []


def _card(d: DeviceStatus, now: float, *, advised: bool) -> str:
    """Return a device: its incidents, and behind a click what the rules say, what happened, and the age of results."""
    verdict, device = d.verdict, d.device
    gone = "" if d.present else " <strong>GONE</strong>"
    found = incidents(verdict)
    began = f", since {_time(found[0].since, seconds=False)}" if found else ""
    said = [_incident(i, device, advised=advised and not n) for n, i in enumerate(found)]
    acks = "".join(f"<li>{_text(describe_ack(a))}</li>" for a in d.acks_to_show)
    notes = [_text(sentence(f.message)) for f in shown_notes(verdict)]
    loud = "" if verdict.state is State.HEALTHY else " loud"
    state = _text(verdict_note(verdict))
    since = f"{state} since {_time(verdict.since)} ({ago(verdict.since, now)}), judged {ago(verdict.decided, now)}"
    return "\n".join(
        [
            f'<article class="{verdict.state.value}{loud}">',
            f"<h3>{_state(verdict.state)} <span>{_text(device.name)}{gone}</span>",
            f"<small>{_text(device.model)}{began}</small></h3>",
            *said,
            *(f'<p class="faint">{note}</p>' for note in notes),
            f"<ul>{acks}</ul>" if acks else "",
            f'<details><summary>{_summary(d, now)}</summary><p class="faint">{_text(device.uuid)}<br>{since}</p>',
            _details(d),
            _evidence(newest_of([d]), now),
            "</details></article>",
        ]
    )


def _incident(incident: Incident, device: Device, *, advised: bool) -> str:
    """Return an incident as one paragraph; `advised`: what to do about it stands at the top of the page."""
    state = incident.state.value
    todo = "" if advised else _html([step(incident, device), next_step(incident, device)])
    action = f"<br><strong>Do now:</strong> {todo}" if todo else ""
    silent = incident.wrong is not None or awaits_tests(incident)
    cause = "" if silent else f'<span class="faint">({_text(cause_note(incident.cause))})</span>'
    return f'<p class="incident {state}">{_text(told(incident))} {cause}{action}</p>'


def _summary(d: DeviceStatus, now: float) -> str:
    """Return what stands behind the click, and which probe had no result for longest."""
    if d.stalest is None:
        return "Details; no probe has run yet"
    probe, at = d.stalest
    return f"Details; oldest result: {_text(probe)} ({age(at, now)})"


def _details(d: DeviceStatus) -> str:
    findings = "".join(_finding(f) for f in d.verdict.findings if f.state is not State.HEALTHY)
    notes = "".join(_finding(f) for f in d.verdict.findings if f.state is State.HEALTHY)
    events = "".join(f"<li>{_text(event)}</li>" for event in reversed(describe_events(d.events)))
    return "\n".join(
        [
            f'<ul class="findings">{findings}</ul>' if findings else "",
            f'<ul class="findings notes">{notes}</ul>' if notes else "",
            f"<h4>In the last day, newest first</h4><ul>{events}</ul>" if events else "",
        ]
    )


def _finding(finding: Finding) -> str:
    rivals = "".join(f"<li>{_text(rival_words(r))}</li>" for r in finding.rivals)
    evidence = "".join(f"<li>{_text(sentence)}</li>" for sentence in finding.evidence)
    runs = f"Runs: {_text(', '.join(finding.runs))}" if finding.runs else ""
    return "".join(
        [
            f'<li class="finding {finding.state.value}">{_text(rule_words(finding))}: {_text(finding.message)}',
            f"<p><strong>Do now:</strong> {_text(finding.action)}</p>" if finding.action else "",
            f"<ul>{evidence}</ul>" if evidence else "",
            f"<p>To repeat the test: <code>{_text(finding.repro)}</code></p>" if finding.repro else "",
            f"<p>Other explanations:</p><ul>{rivals}</ul>" if rivals else "",
            f'<p class="faint">{runs}</p></li>',
        ]
    )


def _evidence(newest: Newest, now: float) -> str:
    """Return the age of each probe's newest evidence."""
    rows = "".join(
        f"<tr><th>{_text(probe)}</th><td>{'none yet' if at is None else f'{ago(at, now)}, {_time(at)}'}</td></tr>"
        for probe, at in newest.items()
    )
    return f"<table>{rows}</table>" if rows else ""


def _state(state: State) -> str:
    shape = f'<svg class="shape" viewBox="0 0 24 24" aria-hidden="true">{SHAPES[state]}</svg>'
    return f'<span class="state {state.value}">{shape} {state.value}</span>'


def _icon(state: State) -> str:
    shape = SHAPES[state].replace('class="ink"', 'stroke="#fff" fill="none"')
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24" fill="{INKS[state]}">{shape}</svg>'


def _time(at: float, *, seconds: bool = True) -> str:
    exact = datetime.fromtimestamp(at, tz=timezone.utc).isoformat(timespec="seconds")
    return f'<time datetime="{exact}">{format_time(at, seconds=seconds)}</time>'
