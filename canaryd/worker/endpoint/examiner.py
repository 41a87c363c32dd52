"""Ask a served exact canary its questions, one at a time and several at once, and compare the answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from canaryd.facts import ENDPOINT_SERVER, TRIALS, Comparison, Evidence, Exactness, Span
from canaryd.probe import Absent, Context, Fact, Reading, Skip, Skipped
from canaryd.worker.endpoint import excuses
from canaryd.worker.endpoint.canary import Endpoint, new_salt, wanted
from canaryd.worker.endpoint.client import Refused, Replayed
from canaryd.worker.endpoint.marking import Marked, Sort, hexadecimal, mark
from canaryd.worker.endpoint.prompts import Prompt
from canaryd.worker.exact_canary.expected import Expected, Question, spell, tokens_of, word

REPEATS = 3
"""Number of times that a question with a wrong answer is asked again, alone (ours)."""
SHOWN = 64
"""Maximum number of wrong places that the evidence keeps, as in every other probe."""
BLIND = "the server gives no log probabilities: only the words are compared"


class Examiner:
    """Asks the questions, keeps the compared answers of each case, and yields comparisons."""

    def __init__(self, ctx: Context, endpoint: Endpoint, expected: Expected) -> None:
        self.ctx, self.endpoint, self.expected = ctx, endpoint, expected
        self.refused: dict[str, str] = {}
        """APIs that the server declines, with the reason."""
        self._marked: dict[str, list[Marked]] = {}
        """Answers that are in no comparison yet, by case."""
        self._seen: dict[str, list[Marked]] = {}
        """All answers, by API."""
        self._again: dict[tuple[str, int], list[Marked]] = {}
        self._drilled = not ctx.drill
        self._strained: dict[str, str] = {}

    def alone(self, api: str, question: Question) -> None:
        """Ask one question while canaryd sends no other, then ask it again to get an answer from the prefix cache."""
        if api in self.refused:
            return
        salt, answers = new_salt(), []
        try:
            for case, fresh in ((f"{api}/alone", True), (f"{api}/again", False)):
                marked = self._asked(api, question, fresh=fresh, salt=salt)
                answers.append(marked.answer)
                self._keep(case, marked)
            self.endpoint.refuse_replays(api, _prompt(question), salt, answers)
        except Refused as refused:
            self.refused[api] = str(refused)
            if isinstance(refused, Replayed):
                self._forget(api)

    def together(self, api: str, questions: Sequence[Question]) -> None:
        """Ask several different questions at the same time and keep the answers; a failure is noted for the case."""
        case = f"{api}/{len(questions)}-at-once"
        if api in self.refused or case in self._strained:
            return
        with ThreadPoolExecutor(len(questions)) as pool:
            asked = [pool.submit(self._asked, api, q, fresh=True, salt=new_salt()) for q in questions]
        for future in asked:
            try:
                self._keep(case, future.result())
            except Skip as error:
                self._strained[case] = f"the server did not answer {len(questions)} requests at once: {error}"

    def accused(self, api: str) -> Iterator[Comparison]:
        """Yield a comparison for each new wrong answer that no excuse explains, so that a killed run keeps them.

        Two kinds of wrong answers are left for `concluded`: answers that came again while no answer was right to the
        last bit yet; and answers that did not come again from a server that gives no log probabilities.
        """
        mine = {case: [m for m in marked if not m.right] for case, marked in self._of(api).items()}
        mine = {case: wrong for case, wrong in mine.items() if wrong}
        if not mine or self._excuse(api) or excuses.may_be_penalty(self.expected, self._seen[api]):
            return
        first = [wrong[0] for wrong in mine.values()]
        alike = any(again.look == m.look for m in first for again in self._repeats(api, m.question))
        sure = self._proven if alike else any(m.scored for m in self._seen[api])
        if not sure:
            return
        for case, wrong in mine.items():
            yield self._comparison(case, wrong)
            self._marked[case] = [m for m in self._marked[case] if m.right]

    def concluded(self) -> Iterator[Fact]:
        """Yield the remaining comparisons and readings; raise `Skip` if an excuse holds or no answer was compared."""
        yield from self._readings()
        reasons, trials = [], 0
        for case, reason in self._strained.items():
            yield Skipped(case=case, reason=reason)
        for api in self.endpoint.settings.apis:
            reason = self._excuse(api)
            if api in self.refused and wanted(self.ctx, api):
                yield Skipped(case=api, reason=self.refused[api])
            trials += len(self._seen.get(api, ())) - sum(map(len, self._of(api).values()))
            for case, marked in self._of(api).items():
                if not reason or all(m.right for m in marked):
                    trials += len(marked)
                    yield self._comparison(case, marked)
            reasons += [f"{api}: {reason}"] if reason else []
        yield Reading(name=TRIALS, value=trials, unit="1")
        if reasons:
            raise Skip("; ".join(dict.fromkeys(reasons)))
        if not trials:
            raise Skip("; ".join([*self.refused.values(), *self._strained.values()]) or "no question was asked")

    def _of(self, api: str) -> dict[str, list[Marked]]:
        return {case: marked for case, marked in self._marked.items() if case.startswith(f"{api}/") and marked}

    @property
    def _proven(self) -> bool:
        """Whether at least one answer was right to the last bit; a server that rounds cannot give such an answer."""
        return any(m.fine or m.right for seen in self._seen.values() for m in seen)

    def _asked(self, api: str, question: Question, *, fresh: bool, salt: str) -> Marked:
        answer = self.endpoint.ask(api, _prompt(question), fresh=fresh, salt=salt)
        if not self._drilled:
            self._drilled = True  # one wrong word, whatever the drill's fault, without log probabilities
            tokens = tokens_of(self.expected.program, answer.text) or [0]
            tokens[len(tokens) // 2] ^= 1
            answer = replace(answer, text=spell(self.expected.program, tokens), positions=(), scored=False)
        return mark(self.expected, question, answer)

    def _keep(self, case: str, marked: Marked) -> None:
        if wanted(self.ctx, case):
            self._marked.setdefault(case, []).append(marked)
            self._seen.setdefault(case.partition("/")[0], []).append(marked)

    def _forget(self, api: str) -> None:
        """Drop an API's answers, except wrong ones to first requests, which no cache can have given."""
        self._marked.pop(f"{api}/again", None)
        left = [m for marked in self._of(api).values() for m in marked if not m.right]
        self._marked[f"{api}/alone"] = self._seen[api] = left

    def _excuse(self, api: str) -> str:
        """Return the harmless explanation of an API's wrong answers, or "" if none fits; may ask questions again."""
        every = self._seen.get(api, [])
        if all(m.right for m in every):
            return ""
        if reason := excuses.excuse(self.expected, api, every, self.endpoint.formats()):
            return reason
        wrong = {m.question.number: m for m in every if not m.right}
        if self.ctx.drill or any(m.scored for m in every):
            return ""
        again = {n: any(r.look == m.look for r in self._repeats(api, m.question)) for n, m in wrong.items()}
        return excuses.may_be_sampling(self.expected, every, again)

    def _repeats(self, api: str, question: Question) -> list[Marked]:
        """Return up to `REPEATS` answers to a question that is asked again alone; fewer if the server fails."""
        found = self._again.setdefault((api, question.number), [])
        while len(found) < REPEATS and not self.ctx.drill:
            try:
                found.append(self._asked(api, question, fresh=True, salt=new_salt()))
            except Skip:
                break
        return found

    def _comparison(self, case: str, marked: Sequence[Marked]) -> Comparison:
        numbers = sorted({m.question.number for m in marked})
        wrong = [m for m in marked if not m.right]
        evidence = self._evidence(case.partition("/")[0], wrong, marked) if wrong else None
        again = evidence is not None and (evidence.repeats_alike or 0) < evidence.repeats
        return Comparison(
            case=case,
            shape=f"prompts {', '.join(map(str, numbers))} of {len(self.expected.questions)}, {self._words} words",
            seed=self.expected.seed,
            exactness=Exactness.UNIVERSAL,
            trials=len(marked),
            wrong_trials=len(wrong),
            evidence=evidence,
            # A format that rounds is wrong everywhere, and always in the same way: until something was right, or came
            # out otherwise the next time, nobody can tell.
            characterised=self._proven or again,
        )

    @property
    def _words(self) -> int:
        return len(self.expected.questions[0].tokens)

    def _evidence(self, api: str, wrong: Sequence[Marked], marked: Sequence[Marked]) -> Evidence:
        faults = [(m.question.number, f) for m in wrong for f in m.faults]
        numbers = [m.question.number for m in wrong]
        again = self._repeats(api, wrong[0].question)
        repeated = [m for m in again if not m.right]
        return Evidence(
            wrong=len({(i, f.position) for i, m in enumerate(wrong) for f in m.faults}),
            total=sum(len(m.question.tokens) for m in marked),
            first=tuple(((number, f.position + 1), *hexadecimal(f)) for number, f in faults[:SHOWN]),
            bits={},
            zeroed=0,
            nonfinite=sum(f.sort not in (Sort.WORD, Sort.CHOICE) and not abs(f.got) < 1e30 for _, f in faults),
            lines={"prompt": Span(first=min(numbers), last=max(numbers), distinct=len(set(numbers)))},
            pattern=self._pattern(wrong[0]),
            repeats=len(again),
            repeats_wrong=len(repeated),
            repeats_alike=sum(m.look == wrong[0].look for m in repeated),
        )

    def _pattern(self, wrong: Marked) -> str:
        if not wrong.faults:
            return f"prompt {wrong.question.number}: {len(wrong.tokens or ())} of {self._words} words came"
        # A wrong word says more than the log probabilities at its place.
        here = [f for f in wrong.faults if f.position == wrong.faults[0].position]
        fault = next((f for f in here if f.sort is Sort.WORD), here[0])
        where = f"prompt {wrong.question.number}, word {fault.position + 1} of {self._words}"
        if fault.sort is Sort.WORD:
            wanted, got = (word(self.expected.program, int(token)) for token in (fault.wanted, fault.got))
            return f"{where}: wanted {wanted}, got {got}"
        what = "log probability" if fault.sort is Sort.CHANCE else "lead over a candidate"
        return f"{where}: the right word's {what} is {fault.got!r}, wanted {fault.wanted!r}"

    def _readings(self) -> Iterator[Fact]:
        endpoint = self.endpoint
        prints = dict.fromkeys(m.answer.fingerprint for seen in self._seen.values() for m in seen)
        parts = [endpoint.dialect.name, endpoint.version, *prints, endpoint.configuration]
        yield Reading(name=ENDPOINT_SERVER, value=" ".join(filter(None, dict.fromkeys(parts)))[:200])
        yield Reading(name="switches", value=endpoint.switches())
        if endpoint.started is not None:
            yield Reading(name="endpoint_start_time_seconds", value=endpoint.started, unit="seconds")
        for api in endpoint.settings.apis:
            mine = self._seen.get(api, [])
            if mine and not any(m.scored for m in mine):
                yield Absent(name=f"endpoint_logprobs{{api={api}}}", reason=BLIND)


def _prompt(question: Question) -> Prompt:
    return Prompt(name=f"exact-{question.number}", text=question.text, tokens=len(question.tokens))
