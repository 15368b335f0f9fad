"""Statements of a launcher."""

import ast
import re
from collections.abc import Sequence
from copy import copy
from typing import Any

from mis_plugins.explain.launch.bash.builtins import NAMES_TRAIN
from mis_plugins.explain.launch.python.calls import STARTS, Calls
from mis_plugins.explain.launch.python.values import LOOPS, Raised, Record, Round, equal, name_of, names_set, says
from mis_plugins.explain.launch.reader import PACKAGES, UNCALLED, Clause, Returned, all_of, any_of
from mis_plugins.explain.launch.words import hole


class Launcher(Calls):
    """A launcher whose statements are read and never executed."""

    def run_everything(self, tree: ast.Module) -> None:
        """Read the file as its start would run it; where that starts no training, each command by itself."""
        for node in ast.walk(tree):
            named = [x.name for x in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "")]
            self.hosts |= {(name or "").partition(".")[0] for name in named} & PACKAGES
        self.attempt(lambda: self.block(tree.body))
        if not self.found:
            self.run_commands()
        if self.options and self.of_fields is None:
            self.reading.unread[0] = f"{' '.join(self.options)}: no command is seen that takes it"
        for node in (part for part in ast.walk(tree) if isinstance(part, ast.FunctionDef | ast.Lambda)):
            is_read = node.args in self.called or getattr(node, "decorator_list", [])
            if not is_read and re.search(rf"\b{STARTS}|{NAMES_TRAIN.pattern}", ast.unparse(node)):
                name = f"def {node.name}" if isinstance(node, ast.FunctionDef) else "lambda"
                self.reading.unread[node.lineno] = f"{name}: {UNCALLED}"

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        function = copy(node)  # each call of the function around it makes another
        self.store(node.name, function)
        self.define(function)

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        """A function without a name; one with defaults is not known, since each round of a loop may give it others."""
        if node.args.defaults or any(node.args.kw_defaults):
            self.lose_within(node.body)
            return self.unknown(node, *map(self.visit, filter(None, (*node.args.defaults, *node.args.kw_defaults))))
        function = ast.FunctionDef("lambda", node.args, [ast.copy_location(ast.Return(node.body), node)], [])
        self.define(ast.copy_location(function, node))
        return function

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.store(node.name, node)
        for part in node.body:
            if isinstance(part, ast.FunctionDef):
                self.define(part)
            elif isinstance(part, ast.AnnAssign) and name_of(part.value) != "field":
                self.keep_defaults([part.value])
            elif isinstance(part, ast.Assign | ast.Expr):
                self.lose(self.visit(part.value))

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            name = alias.name if alias.asname or module else alias.name.partition(".")[0]
            self.store(alias.asname or name, hole(module + name))

    visit_ImportFrom = visit_Import

    def visit_Global(self, node: ast.Global) -> None:
        self.outside |= dict.fromkeys(node.names, self.globals)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self.outside |= {name: scope for scope in self.around for name in node.names if name in scope}

    def visit_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            self.assign(target, self.unknown(target))

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self.visit(node.value)
        for target in node.targets:
            self.assign(target, value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node.target, self.visit(node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        before = self.visit(node.target)
        value = self.operate(node, before, node.op, self.visit(node.value))
        if self.is_shared(before):
            self.changed(before, value)
        self.assign(node.target, value)

    def visit_If(self, node: ast.If) -> None:
        test = (says(node.test), self.truth(node.test), lambda: self.block(node.body))
        self.choose([test, ("else", True, lambda: self.block(node.orelse))])

    def visit_Match(self, node: ast.Match) -> None:
        source, subject = says(node.subject), self.visit(node.subject)
        self.choose([self.clause(case, source, subject) for case in node.cases])

    def clause(self, case: ast.match_case, source: str, subject: Any) -> Clause:
        holds = self.fits(subject, case.pattern) if case.guard is None else None
        return f"{source} is {says(case.pattern)}", holds, lambda: self.case(case, subject)

    def case(self, case: ast.match_case, subject: Any) -> None:
        self.forget(case.pattern)
        if isinstance(case.pattern, ast.MatchAs) and case.pattern.name is not None:
            self.store(case.pattern.name, subject)
        elif names_set(case.pattern):
            self.lose(*self.parts(subject))
        self.block(case.body)

    def fits(self, subject: Any, pattern: ast.pattern) -> bool | None:
        if isinstance(pattern, ast.MatchAs):
            return pattern.pattern is None or self.fits(subject, pattern.pattern)
        if isinstance(pattern, ast.MatchValue):
            return equal(subject, self.visit(pattern.value))
        if isinstance(pattern, ast.MatchOr):
            return any_of([self.fits(subject, alternative) for alternative in pattern.patterns])
        has_rest = any(isinstance(part, ast.MatchStar) for part in ast.walk(pattern))
        if isinstance(pattern, ast.MatchSequence) and isinstance(subject, list) and not has_rest:
            pairs = zip(subject, pattern.patterns, strict=False)
            return all_of([len(subject) == len(pattern.patterns), *(self.fits(*pair) for pair in pairs)])
        return None

    def visit_For(self, node: ast.For) -> None:
        values = self.visit(node.iter)
        if isinstance(values, list) and len(values) <= LOOPS:
            self.rounds(node, values)
        else:
            self.lose(*self.parts(values))
            self.some_rounds(node, f"for {says(node.target)} in {says(node.iter)}")

    def visit_While(self, node: ast.While) -> None:
        self.some_rounds(node, f"while {says(node.test)}")

    def some_rounds(self, node: ast.For | ast.While, label: str) -> None:
        """A loop whose number of rounds is not known: one round tells what it starts."""
        value, count = self.unknown(node.target if isinstance(node, ast.For) else node.test), len(self.found)
        self.fork(label, lambda: self.rounds(node, [value]), lambda: self.block(node.orelse))
        self.forget(*node.body)
        if len(self.found) > count:  # a start in a later round is given what the rounds before have set
            self.fork(label, lambda: self.rounds(node, [value]), lambda: None)
            self.forget(*node.body)

    def rounds(self, node: ast.For | ast.While, values: Sequence[Any]) -> None:
        with self.now(round=self.forks):
            for value in values:
                if isinstance(node, ast.For):
                    self.assign(node.target, value)
                try:
                    self.block(node.body)
                except Round as ended:
                    if ended.breaks:
                        return
            self.block(node.orelse)

    def visit_Break(self, node: ast.Break | ast.Continue) -> None:
        if self.forks == self.round:
            raise Round(isinstance(node, ast.Break))
        self.unread(node, f"depends on {self.branch}")

    visit_Continue = visit_Break

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            value = self.visit(item.context_expr)
            self.lose(*([value] if isinstance(value, Record) else ()))
            if item.optional_vars is not None:
                self.assign(item.optional_vars, value)
        self.block(node.body)

    def visit_Try(self, node: ast.Try) -> None:
        """No statement is taken to raise anything, but for `raise`."""
        with self.now(tried=self.forks if node.handlers else self.tried):
            ended = self.attempt(lambda: self.block([*node.body, *node.orelse]))
        if node.handlers:
            self.reading.assumed[f"nothing raises in lines {node.lineno} to {node.end_lineno}"] = None
        if isinstance(ended, Raised) and node.handlers:
            if len(node.handlers) > 1:
                self.unread(node, "one of several handlers goes on")
            self.reading.ended = ""
            handler = node.handlers[0]
            if handler.name is not None:
                self.store(handler.name, hole(handler.name))
            ended = self.attempt(lambda: self.block(handler.body))
        self.block(node.finalbody)
        if ended is not None:
            raise ended

    def visit_Return(self, node: ast.Return) -> None:
        value = None if node.value is None else self.visit(node.value)
        raise Returned((value, [dict(scope) for scope in self.scopes()]))

    def visit_Raise(self, node: ast.Raise) -> None:
        if self.tried is not None and self.forks > self.tried:
            self.unread(node, f"depends on {self.branch}, and a handler may go on")
        self.reading.ended = f": with these arguments the launcher raises in line {node.lineno}"
        raise Raised
