// graphile-worker with the settings of its own performance page: a local queue of 500, jobs
// completed in batches, 24 at a time.
import { main } from "./program.mjs";

// It reads this when it is loaded, and would write a line for each job otherwise.
process.env.NO_LOG_SUCCESS = "1";
const { Logger, makeWorkerUtils, run } = await import("graphile-worker");
const logger = new Logger(() => (level, message) => {
  if (level === "error" || level === "warning") console.error(message);
});

const BATCH = 5000;

const using = async (dsn, use) => {
  const utils = await makeWorkerUtils({ connectionString: dsn, logger });
  try {
    await use(utils);
  } finally {
    await utils.release();
  }
};

await main({
  prepare: (dsn) => using(dsn, (utils) => utils.migrate()),
  fill: (dsn, number) =>
    using(dsn, async (utils) => {
      for (let left = number; left > 0; left -= BATCH) {
        const batch = Array.from({ length: Math.min(BATCH, left) }, () => ({
          identifier: "noop",
          payload: {},
        }));
        await utils.addJobs(batch);
      }
    }),
  work: async (dsn, name, handlers) => {
    const stamping = name === "stamp";
    const runner = await run({
      preset: {
        worker: {
          connectionString: dsn,
          logger,
          concurrentJobs: 24,
          maxPoolSize: 25,
          completeJobBatchDelay: 0,
          failJobBatchDelay: 0,
          // Without a local queue a single job starts sooner.
          ...(stamping ? {} : { localQueue: { size: 500, refetchDelay: { durationMs: 10 } } }),
        },
      },
      taskList: { [name]: handlers[name] },
      noHandleSignals: true,
    });
    process.on("SIGTERM", () => runner.stop());
    await runner.promise;
  },
  produce: (dsn, loop) => using(dsn, (utils) => loop((payload) => utils.addJob("stamp", payload))),
});
