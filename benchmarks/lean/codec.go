package main

import (
	"fmt"

	"google.golang.org/grpc/mem"
)

// message is what the generated stubs can do without reflection.
type message interface {
	SizeVT() int
	MarshalToSizedBufferVT([]byte) (int, error)
	UnmarshalVTUnsafe([]byte) error
}

// codec reads and writes the stubs. Strings of a message that was read point into the bytes it
// came in, so these are copied out of the transport's buffers once and then belong to it.
type codec struct{}

func (codec) Name() string { return "proto" }

func (codec) Marshal(value any) (mem.BufferSlice, error) {
	m, ok := value.(message)
	if !ok {
		return nil, fmt.Errorf("cannot write a %T", value)
	}
	pool := mem.DefaultBufferPool()
	buffer := pool.Get(m.SizeVT())
	if _, err := m.MarshalToSizedBufferVT(*buffer); err != nil {
		pool.Put(buffer)
		return nil, err
	}
	return mem.BufferSlice{mem.NewBuffer(buffer, pool)}, nil
}

func (codec) Unmarshal(data mem.BufferSlice, value any) error {
	m, ok := value.(message)
	if !ok {
		return fmt.Errorf("cannot read a %T", value)
	}
	return m.UnmarshalVTUnsafe(data.Materialize())
}
