"""The data service: input pipelines on machines of their own, each record to one trainer.

A *dispatcher* knows the job: a list of splits (files, shards of a stream) and how far each
has been read. *Data workers* read splits and buffer chunks of records; *trainers* fetch them.
Any of the three may be killed at any moment. Within an epoch every record still reaches
exactly one trainer exactly once, counted by the trainers' saved positions.

**Chunks are defined once.** A worker leases a split, reads it and cuts it into chunks. A chunk
has an id (epoch, split, sequence) and a definition: a position of the split's source, records
to skip after it, and how many follow. The worker tells the dispatcher of each, which notes it
together with where the next one begins, in one transaction. From then on the chunk is the same
records for ever, and any worker can read it from its definition; the worker that cut it only has
it in memory. A lease is an unguessable name that only its holder knows and that is never used again:
an announcement without it is refused. When a worker is silent for too long its split goes to another,
from where the last noted chunk ended; the old one still announces under the old lease, and is refused. So a
split is cut without gap or overlap.

**Chunks are given once.** A trainer has turns: 0, 1, 2 and so on. When it asks for the chunk of a
turn that has none, the dispatcher gives it the oldest that is free and notes that for good. To ask
again for the same turn gives the same chunk, so lost answers and repeated calls do no harm. No
chunk is ever under two trainers, or twice under one.

**A position is a turn.** A trainer's position is how many turns it has yielded. Restored to it, the
trainer asks for the turns from there and gets the chunks it had before, in the same order, and then
new ones. Chunks that were delivered after the position was saved are delivered again, as they must
be: the model was restored, too. Nothing before it comes again. When a trainer attaches, an older process of
the same name is shut out.

**Acknowledged chunks can be forgotten.** After a checkpoint is complete the trainer may
acknowledge its position. The dispatcher then forgets chunks far behind it, and, if the trainer is
given up (`trainer_timeout`, or `release`), only the chunks after it go to other trainers. Such a trainer can
still resume from that position, not from a later one.

**The dispatcher** keeps all this in SQLite. It can be killed and started again on its folder;
workers and trainers wait for it, and resume. **Back-pressure** runs from the trainer, whose queue is
bounded, through the worker, which stops reading while too many chunks wait. A chunk that was given
to a trainer does not count there, and the oldest of these are dropped and read again when they are
asked for: a dead trainer does not stop the remaining ones.

**The end** reaches a trainer when all splits are read, as often as the job says, and no chunk is
free. If reading a split fails too often, all trainers get an error.

    with Dispatcher(DataJobConfig(splits=files), folder="/var/job") as dispatcher:           # one process
    with DataWorker("host:5050", open_split): ...                                         # any number
    for records in DataServiceSource("host:5050", trainer="worker-0"): ...                # any number
"""

from monolith.data.service.client import DataServiceSource
from monolith.data.service.dispatcher import Dispatcher, dispatcher_from_environment
from monolith.data.service.job import DataJobConfig
from monolith.data.service.messages import PortGuard
from monolith.data.service.worker import DataWorker, DataWorkerConfig, OpenSplit

__all__ = [
    "DataJobConfig",
    "DataServiceSource",
    "DataWorker",
    "DataWorkerConfig",
    "Dispatcher",
    "OpenSplit",
    "PortGuard",
    "dispatcher_from_environment",
]
