package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	pb "fencepost.dev/benchmarks/lean/fencepostv1"
	"google.golang.org/grpc"
)

const (
	// Completions go at once when none is unanswered, else in company.
	flushEntries = 64
	batchMax     = 128
	flushAfter   = 10 * time.Millisecond
	resendAfter  = 5 * time.Second
	// What one worker may hold, completions without a verdict included.
	heldMax = 5000
)

var succeeded = &pb.Completion_Success{Success: &pb.Success{}}

// runKey compares as the protocol asks: by all digits of the instant.
type runKey struct {
	job     string
	seconds int64
	nanos   int32
}

func keyOf(run *pb.RunKey) runKey {
	return runKey{run.GetJobId(), run.GetScheduledAt().GetSeconds(), run.GetScheduledAt().GetNanos()}
}

// assigned is a run from its receipt to its verdict.
type assigned struct {
	completion pb.Completion
	in         *sent
}

// sent is one message of completions, kept until all have their verdicts.
type sent struct {
	at   time.Time
	runs []*assigned
	left int
}

// session is one stream and what it holds; only its own goroutine touches it.
type session struct {
	stream  grpc.ClientStream
	options options
	counts  *counts

	received    int64 // runs
	receivedSeq int64
	creditTold  int64
	seqTold     int64
	held        map[runKey]*assigned
	pending     []*assigned // not sent yet
	unanswered  []*sent     // oldest first
	resent      bool

	heartbeatSeq int64
	ackedSeq     int64
	beatAt       time.Time
	interval     time.Duration
	ackTimeout   time.Duration

	flushing, draining, drained, saidGoodbye bool
}

func newSession(stream grpc.ClientStream, o options, shared *counts) *session {
	return &session{stream: stream, options: o, counts: shared, held: map[runKey]*assigned{}}
}

// run says Hello, works, and leaves when asked to or when there is enough.
func (s *session) run(broken, leaving context.Context) error {
	if err := s.open(); err != nil {
		return err
	}
	arrived := make(chan *pb.WorkResponse)
	ended := make(chan error, 1)
	go s.read(broken, arrived, ended)
	flush := time.NewTimer(flushAfter)
	defer flush.Stop()
	watch := time.NewTicker(time.Second)
	defer watch.Stop()
	leave := leaving.Done()
	for {
		var err error
		select {
		case response := <-arrived:
			err = s.take(response)
			switch {
			case err != nil || len(s.pending) == 0:
			case len(s.pending) >= flushEntries || len(s.held) == len(s.pending):
				err = s.flush()
			case !s.flushing:
				s.flushing = true
				flush.Reset(flushAfter)
			}
		case <-flush.C:
			s.flushing = false
			err = s.flush()
		case <-watch.C:
			err = s.watch()
		case <-leave:
			leave = nil
			s.draining = true
			err = s.send(&pb.WorkRequest{Event: &pb.WorkRequest_Drain{Drain: &pb.WorkerDrain{}}})
		case err = <-ended:
			if errors.Is(err, io.EOF) && s.saidGoodbye {
				return nil
			}
			err = fmt.Errorf("the stream ended: %w", err)
		}
		if err == nil && s.drained && len(s.held) == 0 && !s.saidGoodbye {
			err = s.send(&pb.WorkRequest{Event: &pb.WorkRequest_Goodbye{Goodbye: &pb.Goodbye{}}})
			if err == nil {
				err = s.stream.CloseSend()
			}
			s.saidGoodbye = true
		}
		if err != nil {
			return err
		}
	}
}

// open exchanges Hello and Welcome, and gives the first credit.
func (s *session) open() error {
	hello := &pb.Hello{
		WorkerId:    uuid(),
		DisplayName: "lean",
		MinRevision: 1,
		MaxRevision: 1,
		Sdk:         &pb.SdkInfo{Name: "lean"},
		Subscriptions: []*pb.QueueSubscription{{
			Queue: s.options.queue,
		}},
		Slots: int32(s.options.slots),
	}
	if err := s.stream.SendMsg(&pb.WorkRequest{Event: &pb.WorkRequest_Hello{Hello: hello}}); err != nil {
		return err
	}
	var first pb.WorkResponse
	if err := s.stream.RecvMsg(&first); err != nil {
		return err
	}
	welcome := first.GetWelcome()
	if welcome == nil || welcome.GetRevision() != 1 {
		return fmt.Errorf("expected a Welcome of revision 1, got %v", &first)
	}
	s.interval = welcome.GetHeartbeatInterval().AsDuration()
	s.ackTimeout = welcome.GetHeartbeatAckTimeout().AsDuration()
	s.beatAt = time.Now()
	return s.send(&pb.WorkRequest{})
}

// read hands over what arrives until the stream ends.
func (s *session) read(broken context.Context, arrived chan<- *pb.WorkResponse, ended chan<- error) {
	for {
		response := new(pb.WorkResponse)
		if err := s.stream.RecvMsg(response); err != nil {
			ended <- err
			return
		}
		select {
		case arrived <- response:
		case <-broken.Done():
			return
		}
	}
}

func (s *session) take(response *pb.WorkResponse) error {
	switch event := response.GetEvent().(type) {
	case *pb.WorkResponse_Runs:
		return s.handle(event.Runs)
	case *pb.WorkResponse_Verdicts:
		return s.judge(event.Verdicts.GetVerdicts())
	case *pb.WorkResponse_HeartbeatAck:
		if seq := event.HeartbeatAck.GetSeq(); seq != s.ackedSeq+1 || seq > s.heartbeatSeq {
			return fmt.Errorf("heartbeat %d answered after %d, %d sent", seq, s.ackedSeq, s.heartbeatSeq)
		}
		s.ackedSeq++
	case *pb.WorkResponse_DrainAck:
		if last := event.DrainAck.GetLastBatchSeq(); !s.draining || last != s.receivedSeq {
			return fmt.Errorf("drained after batch %d, %d received", last, s.receivedSeq)
		}
		s.drained = true
	case *pb.WorkResponse_ServerDrain:
		if !s.draining {
			return fmt.Errorf("the server asked to move: %s", event.ServerDrain.GetReason())
		}
	case *pb.WorkResponse_WorkerStop:
		s.counts.enough()
	}
	// Notices are about runs with a completion on its way: the verdict decides.
	return nil
}

// handle carries out a batch, which for a no-op is to make the completions.
func (s *session) handle(batch *pb.RunBatch) error {
	if seq := batch.GetBatchSeq(); seq != s.receivedSeq+1 || s.drained {
		return fmt.Errorf("batch %d after %d, drained: %t", seq, s.receivedSeq, s.drained)
	}
	s.receivedSeq++
	s.received += int64(len(batch.GetRuns()))
	if s.received > s.creditTold {
		return fmt.Errorf("%d runs for a credit of %d", s.received, s.creditTold)
	}
	if !s.options.stamp {
		s.counts.begun()
	}
	now := monotonic()
	runs := make([]assigned, len(batch.GetRuns()))
	for i, assignment := range batch.GetRuns() {
		key := keyOf(assignment.GetRun())
		if earlier := s.held[key]; earlier != nil {
			if earlier.completion.GetAttempt() < assignment.GetAttempt() {
				return fmt.Errorf("run %v was claimed again while it was held", key)
			}
			continue // A duplicate.
		}
		if s.options.stamp {
			if err := stamp(assignment, now); err != nil {
				return err
			}
		}
		run := &runs[i]
		run.completion.Run, run.completion.Attempt = assignment.GetRun(), assignment.GetAttempt()
		run.completion.Outcome = succeeded
		s.held[key] = run
		s.pending = append(s.pending, run)
	}
	return nil
}

// judge settles runs; a verdict that does not say "stored" is an error.
func (s *session) judge(verdicts []*pb.AttemptVerdict) error {
	var settled int64
	for _, verdict := range verdicts {
		key := keyOf(verdict.GetRun())
		again := s.resent && verdict.GetVerdict() == pb.Verdict_VERDICT_ALREADY_APPLIED
		run := s.held[key]
		if run == nil || run.in == nil || run.completion.GetAttempt() != verdict.GetAttempt() {
			if again {
				continue
			}
			return fmt.Errorf("a verdict for a run that is not reported: %v", verdict)
		}
		if verdict.GetVerdict() != pb.Verdict_VERDICT_APPLIED && !again ||
			verdict.GetRunState() != pb.RunState_RUN_STATE_SUCCEEDED {
			return fmt.Errorf("not stored: %v", verdict)
		}
		delete(s.held, key)
		run.in.left--
		settled++
	}
	for len(s.unanswered) > 0 && s.unanswered[0].left == 0 {
		s.unanswered = s.unanswered[1:]
	}
	s.counts.stored(settled)
	if s.credit() >= s.creditTold+int64(s.options.slots)/2 {
		return s.send(&pb.WorkRequest{}) // Credit that was held back while too much was held.
	}
	return nil
}

// flush sends the completions that wait.
func (s *session) flush() error {
	for len(s.pending) > 0 {
		number := min(len(s.pending), batchMax)
		batch := &sent{at: time.Now(), runs: s.pending[:number:number], left: number}
		s.pending = s.pending[number:]
		s.unanswered = append(s.unanswered, batch)
		completions := make([]*pb.Completion, number)
		for i, run := range batch.runs {
			run.in = batch
			completions[i] = &run.completion
		}
		if err := s.send(&pb.WorkRequest{Event: &pb.WorkRequest_Completions{
			Completions: &pb.Completions{Completions: completions}}}); err != nil {
			return err
		}
	}
	return nil
}

// watch heartbeats, and sends again what has no verdict for too long.
func (s *session) watch() error {
	now := time.Now()
	if s.ackedSeq < s.heartbeatSeq && now.Sub(s.beatAt) > s.ackTimeout {
		return fmt.Errorf("heartbeat %d has no answer after %s", s.heartbeatSeq, s.ackTimeout)
	}
	for len(s.unanswered) > 0 && now.Sub(s.unanswered[0].at) > resendAfter {
		for _, run := range s.unanswered[0].runs {
			if s.held[keyOf(run.completion.GetRun())] == run {
				s.resent = true
				s.pending = append(s.pending, run)
			}
		}
		s.unanswered = s.unanswered[1:]
	}
	if err := s.flush(); err != nil {
		return err
	}
	// A second early, because this looks only once a second.
	if now.Sub(s.beatAt) < s.interval-time.Second {
		return nil
	}
	beat := &pb.Heartbeat{CompleteInventory: true, Runs: make([]*pb.HeldRun, 0, len(s.held))}
	for _, run := range s.held {
		beat.Runs = append(beat.Runs, &pb.HeldRun{
			Run: run.completion.GetRun(), Attempt: run.completion.GetAttempt(),
			Phase: pb.HeldPhase_HELD_PHASE_COMPLETING,
		})
	}
	s.heartbeatSeq++
	s.beatAt, beat.Seq = now, s.heartbeatSeq
	return s.send(&pb.WorkRequest{Event: &pb.WorkRequest_Heartbeat{Heartbeat: beat}})
}

// send adds the receipt and the credit to a message. Nothing follows a Goodbye.
func (s *session) send(request *pb.WorkRequest) error {
	if s.saidGoodbye {
		return nil
	}
	if s.seqTold < s.receivedSeq {
		s.seqTold = s.receivedSeq
		request.ReceivedBatchSeq = s.receivedSeq
	}
	if limit := s.credit(); !s.draining && limit > s.creditTold {
		s.creditTold = limit
		request.CreditLimit = limit
	}
	if err := s.stream.SendMsg(request); err != nil && !errors.Is(err, io.EOF) {
		return err // On EOF the reader knows why.
	}
	return nil
}

// credit is the ceiling to tell: handlers that do nothing leave all slots free, as long as
// the completions without a verdict are not too many.
func (s *session) credit() int64 {
	return s.received + int64(min(s.options.slots, heldMax-len(s.held)))
}
