// What the programs of the Node queues share: their commands, and moments of the monotonic clock.

const seconds = () => Number(process.hrtime.bigint()) / 1e9;
const say = (line) => process.stdout.write(`${line}\n`);

/** Handlers: one that only counts, and one that tells how old the moment in its payload is. */
export const handlers = (wanted) => {
  let seen = 0;
  return {
    noop: () => {
      seen += 1;
      if (seen === 1) say(`first ${seconds()}`);
      if (seen === wanted) say(`last ${seconds()}`);
    },
    stamp: ({ at }) => say((seconds() - at) * 1000),
  };
};

/** Runs `prepare DSN`, `fill DSN N`, `work DSN N`, `stamp DSN` or `produce DSN N MS`. */
export const main = async ({ prepare, fill, work, produce }) => {
  const [command, dsn, ...numbers] = process.argv.slice(2);
  const [number, pause] = numbers.map(Number);
  if (command === "prepare") await prepare(dsn);
  else if (command === "fill") await fill(dsn, number);
  else if (command === "work") await work(dsn, "noop", handlers(number));
  else if (command === "stamp") await work(dsn, "stamp", handlers(0));
  else if (command === "produce") {
    await produce(dsn, async (send) => {
      for (let sent = 0; sent < number; sent += 1) {
        await send({ at: seconds() });
        await new Promise((resolve) => setTimeout(resolve, pause));
      }
    });
  } else throw new Error(`unknown command ${command}`);
};
