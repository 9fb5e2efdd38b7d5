// pg-boss with batches that are fetched without a pause while they come back full, several
// fetchers, and notifications for jobs that come alone.
import { PgBoss } from "pg-boss";
import { main } from "./program.mjs";

const BATCH = 5000;

const using = async (dsn, use) => {
  const boss = new PgBoss({ connectionString: dsn, supervise: false });
  boss.on("error", console.error);
  await boss.start();
  try {
    await use(boss);
  } finally {
    await boss.stop();
  }
};

await main({
  prepare: (dsn) =>
    using(dsn, async (boss) => {
      await boss.createQueue("noop");
      await boss.createQueue("stamp", { notify: true });
    }),
  fill: (dsn, number) =>
    using(dsn, async (boss) => {
      for (let left = number; left > 0; left -= BATCH) {
        const batch = Array.from({ length: Math.min(BATCH, left) }, () => ({ data: {} }));
        await boss.insert("noop", batch);
      }
    }),
  work: async (dsn, name, handlers) => {
    const stamping = name === "stamp";
    const boss = new PgBoss({ connectionString: dsn, max: 10, useListenNotify: stamping });
    boss.on("error", console.error);
    await boss.start();
    const options = stamping
      ? { batchSize: 10, burstWhenBatchFull: true, pollingIntervalSeconds: 0.5 }
      : { batchSize: 1000, localConcurrency: 4, burstWhenBatchFull: true, pollingIntervalSeconds: 0.5 };
    await boss.work(name, options, async (jobs) => {
      for (const job of jobs) handlers[name](job.data);
    });
    process.on("SIGTERM", () => boss.stop().then(() => process.exit(0)));
  },
  produce: (dsn, loop) => using(dsn, (boss) => loop((data) => boss.send("stamp", data))),
});
