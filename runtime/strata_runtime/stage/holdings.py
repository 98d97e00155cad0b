"""What one stage's pages hold and by which weights, from its first step to its last: it notes what frames have it compute, says it when it is asked, and leaves it to
the next epoch. Held by the stage executor; pure.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from strata_planner.contract.block_names import NO_SALT, packed
from strata_planner.contract.frames import FrameHeader, Open, Survey
from strata_planner.contract.roles import Role
from strata_runtime.stage.contents import Content, Contents
from strata_runtime.stage.inheritance import Inheritance, Refill, weights_through


class Holdings:
    """`own`: what each layer computes with, as `weights_by_layer` tells; set anew when a layer changes. `inherited`: what the pages hold already. `log_pages`: the
    first ones, of which what is handed on is kept; None: it is not.
    """

    def __init__(
        self, role: Role, own: tuple[str, ...], inherited: Inheritance | None = None, log_pages: int | None = None
    ) -> None:
        self.own = own
        self._role = role
        self._log_pages = log_pages
        self._inherited = inherited or Inheritance()
        self._contents = Contents(role.page_tokens)
        self._roots: dict[int, bytes] = {}  # of sequences with a salt
        self._through: tuple[str, ...] = ()  # the weights that the last step ran with, through each layer
        self._log_kept = False  # of blocks that were inherited, too
        self._unlogged: set[int] = set()  # blocks without what the stage has handed on of them

    @property
    def weights(self) -> str:
        """Of the last step, through this stage."""
        return self._through[-1]

    def run_with(self, before: str) -> None:
        """The next step does, behind the weights `before` of earlier stages. What others have computed is not what this one would."""
        through = weights_through(before, self.own)
        if through != self._through:
            self._through = through
            self._contents.begin({})

    def survey(self, survey: Survey, *, begins_anywhere: bool) -> Survey:
        """With what this stage has kept worked in. Where it lacks nothing, it goes on from there."""
        self.run_with(survey.weights)
        first, last = self._role.layers
        kept = self._inherited if self._log_pages is None else self._inherited.logged(self._log_pages)
        if not self._role.boundary_log_pages:  # it was wished of the plan before alone
            kept = replace(kept, boundary=0)
        self._log_kept = kept.has_log_of(survey, last + 1, self._through, first)
        if not kept.lacking(survey, first, self._through):
            self._contents.begin(kept.blocks)
            self._unlogged = set(kept.unlogged if self._log_kept else kept.blocks)
        return kept.answer(survey, self._role, self._through, begins_anywhere=begins_anywhere)

    def inherit(self, inherited: Inheritance) -> None:
        """The pages hold this already: more than was said when they were taken."""
        self._inherited = inherited

    def open(self, operation: Open) -> None:
        if operation.root:
            self._roots[operation.sequence] = operation.root

    def free(self, sequence: int, table: Sequence[int]) -> None:
        self._roots.pop(sequence, None)
        self._contents.give_back(table)

    def computed(self, header: FrameHeader, tables: Sequence[Sequence[int]]) -> None:
        """This step is. `tables`: the blocks of each segment's sequence, up to its end."""
        refill = None if header.refill is None else Refill.of(header.refill, self._role)
        if refill is not None and not refill.layers:
            return
        logs = refill is None or refill.writes_log
        if refill is not None and logs:  # blocks that anybody goes on from all lack layers, and are logged anew
            self._contents.forget(self._unlogged)
            self._unlogged.clear()
        begin = 0
        for segment, table in zip(header.segments, tables, strict=True):
            tokens = header.tokens[begin : begin + segment.length]
            begin += segment.length
            if header.draft or not tokens:
                self._contents.spoil(table, segment.start)
            else:
                self._contents.write(table, self._roots.get(segment.sequence, NO_SALT), segment.start, packed(tokens))
            whole = table[-(-segment.start // self._role.page_tokens) :]
            if logs and self._unlogged:
                self._unlogged.difference_update(whole)
            elif not logs and not self._log_kept:
                self._unlogged.update(whole)

    @property
    def blocks(self) -> Mapping[int, Content]:
        """What they hold now."""
        return self._contents.blocks

    def holds(self, formed: int) -> Inheritance:
        """What the pages hold now, beside what follows from blocks that nobody goes on in. From any thread."""
        through = dict(enumerate(self._through, start=self._role.layers[0]))
        return Inheritance(self._role.replica, formed, through, 0, dict(self._contents.blocks))

    def left(self, formed: int, tables: Collection[Sequence[int]]) -> Inheritance:
        """To the next epoch, by the role that was formed in `formed`. `tables`: of sequences that run."""
        through = dict(enumerate(self._through, start=self._role.layers[0]))
        left = Inheritance(
            self._role.replica, formed, through, 0, self._contents.left(tables), frozenset(self._unlogged)
        )
        if self._log_pages is None:
            return left
        return replace(left, boundary=self._role.layers[1] + 1).logged(self._log_pages)
