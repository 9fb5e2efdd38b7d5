package main

import (
	"crypto/rand"
	"fmt"
	"strconv"

	pb "fencepost.dev/benchmarks/lean/fencepostv1"
	"golang.org/x/sys/unix"
)

// monotonic is the machine's monotonic clock in seconds, the same for all its processes.
func monotonic() float64 {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		panic(err)
	}
	return float64(now.Sec) + float64(now.Nsec)/1e9
}

func cpuSeconds() float64 {
	var used unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &used); err != nil {
		panic(err)
	}
	seconds := func(t unix.Timeval) float64 { return float64(t.Sec) + float64(t.Usec)/1e6 }
	return seconds(used.Utime) + seconds(used.Stime)
}

// stamp prints how long ago the moment in the payload was.
func stamp(assignment *pb.Assignment, now float64) error {
	asked, err := strconv.ParseFloat(assignment.GetPayload().GetJson(), 64)
	if err != nil {
		return fmt.Errorf("the payload is not a number of seconds: %w", err)
	}
	_, err = fmt.Printf("%.3f\n", (now-asked)*1000)
	return err
}

func uuid() string {
	var b [16]byte
	if _, err := rand.Read(b[:]); err != nil {
		panic(err)
	}
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
