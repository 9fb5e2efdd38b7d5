// River with the settings of its own benchmark command, short cooldown of fetches, and 500 jobs at
// a time, which did better here than its 2,000; completions in batches are its default.
//
// Commands: prepare DSN, fill DSN N, work DSN N, stamp DSN, produce DSN N MS.
package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"golang.org/x/sys/unix"
)

const batch = 5000

type noopArgs struct{}

func (noopArgs) Kind() string { return "noop" }

type stampArgs struct {
	At float64 `json:"at"`
}

func (stampArgs) Kind() string { return "stamp" }

type noopWorker struct {
	river.WorkerDefaults[noopArgs]
	seen   atomic.Int64
	wanted int64
}

func (w *noopWorker) Work(context.Context, *river.Job[noopArgs]) error {
	switch w.seen.Add(1) {
	case w.wanted:
		fmt.Printf("last %.6f\n", monotonic())
	case 1:
		fmt.Printf("first %.6f\n", monotonic())
	}
	return nil
}

type stampWorker struct {
	river.WorkerDefaults[stampArgs]
}

func (*stampWorker) Work(_ context.Context, job *river.Job[stampArgs]) error {
	_, err := fmt.Printf("%.3f\n", (monotonic()-job.Args.At)*1000)
	return err
}

func main() {
	if err := run(context.Background(), os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "river:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) < 2 {
		return fmt.Errorf("expected a command and a DSN, got %q", args)
	}
	pool, err := pgxpool.New(ctx, args[1])
	if err != nil {
		return err
	}
	defer pool.Close()
	numbers := make([]int, 2)
	for i, text := range args[2:] {
		if numbers[i], err = strconv.Atoi(text); err != nil {
			return err
		}
	}
	driver := riverpgxv5.New(pool)
	switch args[0] {
	case "prepare":
		migrator, err := rivermigrate.New(driver, nil)
		if err != nil {
			return err
		}
		_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
		return err
	case "fill":
		return fill(ctx, driver, numbers[0])
	case "work", "stamp":
		return work(ctx, driver, int64(numbers[0]))
	case "produce":
		return produce(ctx, driver, numbers[0], time.Duration(numbers[1])*time.Millisecond)
	}
	return fmt.Errorf("unknown command %q", args[0])
}

func fill(ctx context.Context, driver *riverpgxv5.Driver, number int) error {
	client, err := river.NewClient(driver, &river.Config{})
	if err != nil {
		return err
	}
	for left := number; left > 0; left -= batch {
		params := make([]river.InsertManyParams, min(batch, left))
		for i := range params {
			params[i].Args = noopArgs{}
		}
		if _, err := client.InsertManyFast(ctx, params); err != nil {
			return err
		}
	}
	return nil
}

func work(ctx context.Context, driver *riverpgxv5.Driver, wanted int64) error {
	workers := river.NewWorkers()
	river.AddWorker(workers, &noopWorker{wanted: wanted})
	river.AddWorker(workers, &stampWorker{})
	client, err := river.NewClient[pgx.Tx](driver, &river.Config{
		FetchCooldown:     2 * time.Millisecond,
		FetchPollInterval: 20 * time.Millisecond,
		Logger:            slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
		Queues:            map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 500}},
		Workers:           workers,
	})
	if err != nil {
		return err
	}
	stopping, release := signal.NotifyContext(ctx, syscall.SIGTERM)
	defer release()
	if err := client.Start(ctx); err != nil {
		return err
	}
	<-stopping.Done()
	return client.Stop(ctx)
}

func produce(ctx context.Context, driver *riverpgxv5.Driver, number int, pause time.Duration) error {
	client, err := river.NewClient(driver, &river.Config{FetchCooldown: 2 * time.Millisecond})
	if err != nil {
		return err
	}
	for range number {
		if _, err := client.Insert(ctx, stampArgs{At: monotonic()}, nil); err != nil {
			return err
		}
		time.Sleep(pause)
	}
	return nil
}

// monotonic is the machine's monotonic clock in seconds, the same for all its processes.
func monotonic() float64 {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		panic(err)
	}
	return float64(now.Sec) + float64(now.Nsec)/1e9
}
