// Lean is a worker that does no more than the protocol asks, for measurements of the server:
// every run it is assigned is completed as succeeded, every verdict is read, and anything but
// "stored" ends it with an error. It leaves after --runs verdicts or on SIGTERM.
//
// It prints "first" and "last" with the seconds of the monotonic clock at its first run and at
// the last verdict that was wanted, and when it leaves the runs and its seconds of CPU.
package main

import (
	"context"
	"flag"
	"fmt"
	"math"
	"os"
	"os/signal"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

const totalWindow = 10_000

type options struct {
	address, queue  string
	sessions, slots int
	runs            int64
	stamp           bool
}

// counts is what all sessions of the process share.
type counts struct {
	done        atomic.Int64
	wanted      int64
	first, last sync.Once
	enough      context.CancelFunc
}

// begun is called when runs have arrived.
func (c *counts) begun() {
	c.first.Do(func() { fmt.Printf("first %.6f\n", monotonic()) })
}

// stored counts verdicts, and asks all sessions to leave when there are enough.
func (c *counts) stored(number int64) {
	if c.done.Add(number) >= c.wanted {
		c.last.Do(func() {
			fmt.Printf("last %.6f\n", monotonic())
			c.enough()
		})
	}
}

func main() {
	var o options
	flag.StringVar(&o.address, "address", "127.0.0.1:7233", "host and port of the server")
	flag.StringVar(&o.queue, "queue", "tenants/default/queues/default", "full name of the queue")
	flag.IntVar(&o.sessions, "sessions", 1, "sessions, each on a connection of its own")
	flag.IntVar(&o.slots, "slots", 0, "runs a session may hold; 0: 10,000 over all sessions, at most 1,000 each")
	flag.Int64Var(&o.runs, "runs", math.MaxInt64, "leave after so many verdicts")
	flag.BoolVar(&o.stamp, "stamp", false, "print, per run, the milliseconds since its payload (seconds of the monotonic clock)")
	flag.Parse()
	if o.sessions < 1 || o.runs < 1 || o.slots < 0 || flag.NArg() > 0 {
		flag.Usage()
		os.Exit(2)
	}
	if o.slots == 0 {
		o.slots = min(1000, max(1, totalWindow/o.sessions))
	}
	// Little is alive at a time: collecting less often costs some megabytes.
	debug.SetGCPercent(400)
	if err := work(o); err != nil {
		fmt.Fprintln(os.Stderr, "lean:", err)
		os.Exit(1)
	}
}

// work opens the sessions and waits until all have left; the first error ends all of them.
func work(o options) error {
	leaving, enough := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer enough()
	broken, breakAll := context.WithCancelCause(context.Background())
	defer breakAll(nil)
	shared := &counts{wanted: o.runs, enough: enough}
	var all sync.WaitGroup
	for range o.sessions {
		all.Go(func() {
			if err := serve(broken, leaving, o, shared); err != nil {
				breakAll(err)
			}
		})
	}
	all.Wait()
	if err := context.Cause(broken); err != nil {
		return err
	}
	fmt.Printf("runs %d cpu %.2f\n", shared.done.Load(), cpuSeconds())
	return nil
}

// serve is one session from connection to goodbye.
func serve(broken, leaving context.Context, o options, shared *counts) error {
	connection, err := grpc.NewClient(o.address,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(codec{})))
	if err != nil {
		return err
	}
	defer connection.Close()
	stream, err := connection.NewStream(broken,
		&grpc.StreamDesc{ClientStreams: true, ServerStreams: true},
		"/fencepost.v1.RunService/Work", grpc.WaitForReady(true))
	if err != nil {
		return err
	}
	return newSession(stream, o, shared).run(broken, leaving)
}
