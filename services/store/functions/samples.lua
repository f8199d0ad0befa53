-- Samples: what the tracker reports of its sample log (services/tracker/sample_log.py).
-- reads and writes: run, samples, samples:state, payload:<payload>

-- args: incarnation of the run, last step whose groups are logged (-1: none), share of tickets that are logged, of 2^32, lease
-- ms, then entries of `samples` that are logged. Renews the tracker's lease, and deletes those entries with their tokens; a
-- deleted one is skipped, and steps never go back within an incarnation, which makes a repeated call harmless. Returns the number
-- of entries that wait.
register('log_samples', {
  'incarnation', NATURAL, 'logged', INTEGER, 'share', NATURAL, 'lease ms', NATURAL, EACH, 'entry', ENTRY,
}, function(prefix, args)
  local state, freed = prefix .. ':samples:state', 0
  local held = redis.call('HMGET', state, 'logged_in', 'logged', 'until_ms', 'bytes')
  local before = tonumber(held[1]) or -1
  if tonumber(args[1]) > before or tonumber(args[1]) == before and tonumber(args[2]) > tonumber(held[2]) then
    redis.call('HSET', state, 'logged_in', args[1], 'logged', args[2])
  end
  redis.call('HSET', state, 'share', args[3], 'until_ms', math.max(tonumber(held[3]) or 0, run_ms(prefix) + tonumber(args[4])))
  local incarnation = redis.call('HGET', prefix .. ':run', 'incarnation')
  for i = 5, #args do
    local found = redis.call('XRANGE', prefix .. ':samples', args[i], args[i])[1]
    if found then
      local fields = {}
      for j = 1, #found[2], 2 do fields[found[2][j]] = found[2][j + 1] end
      -- tokens of an earlier incarnation are gone; by that name the restore may have brought back a group of its table
      if fields.payload ~= '' and fields.incarnation == incarnation then
        redis.call('UNLINK', prefix .. ':payload:' .. fields.payload)
      end
      redis.call('XDEL', prefix .. ':samples', args[i])
      freed = freed + tonumber(fields.size)
    end
  end
  local left = redis.call('XLEN', prefix .. ':samples')
  redis.call('HSET', state, 'bytes', left > 0 and (tonumber(held[4]) or 0) - freed or 0)
  return left
end)
