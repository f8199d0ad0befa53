-- Dead letters: requeues failed tickets.
-- reads and writes: run, deadletter, ledger, outstanding, group:<group>, trained:<epoch>, drops, drops:order
-- owns:             requeued               zset  ids of tickets taken from the dead letters, in the order in which they wait to be
--                                                issued again
--                   requeued:letters       hash  entry -> ticket, of the last that were put back
--                   requeued:letters:order zset  the same entries by the time at which they were put back

-- Return nil if the ticket of a dead letter may be issued again, otherwise the reason why not.
local function objection(prefix, letter)
  if not letter then return 'there is no such dead letter: it was requeued long ago, or trimmed' end
  local ticket = letter.ticket or ''
  local epoch, index = string.match(ticket, '^(%d+)-(%d+)$')
  if letter.outcome ~= 'failed' then return 'its ticket was not under way when it came, or trained before: it never counted as failed' end
  if not epoch or #epoch > 9 or #index > 9 then return 'its ticket id is not of the form <epoch>-<row>' end
  if redis.call('ZSCORE', prefix .. ':outstanding', ticket) then return 'its ticket is under way again' end
  if redis.call('ZSCORE', prefix .. ':requeued', ticket) then return 'its ticket waits to be issued again already' end
  if redis.call('EXISTS', prefix .. ':group:' .. ticket) == 1 then return 'its group is in the replay table or in a step' end
  if redis.call('GETBIT', prefix .. ':trained:' .. epoch, index) == 1 then return 'its prompt was trained' end
end

local function read_letter(prefix, id)
  local found = redis.pcall('XRANGE', prefix .. ':deadletter', id, id) -- the id may be any text: an error has no entries
  if #found == 0 or found[1][1] ~= id then return end
  local fields, letter = found[1][2], {}
  for i = 1, #fields, 2 do letter[fields[i]] = fields[i + 1] end
  return letter
end

-- args: token, entries of the dead-letter stream. Each that was counted as failed and whose ticket is nowhere else leaves the stream and
-- waits to be issued again. Returns {entry, ticket, refusal, 1 if an earlier call put it back, …}; with an empty refusal it was
-- put back. A repeated call changes nothing, and gets the same reply even after the run is over.
register('requeue', {'token', TEXT, EACH, 'entry', TEXT}, function(prefix, args)
  local refusal = busy(prefix)
  if refusal then return refusal end
  local ended = redis.call('HMGET', prefix .. ':run', 'finished', 'stopping')
  local over = (ended[1] or ended[2]) and 'the run is over: ' .. (ended[1] or ended[2])
  local reply, put_back = {}, 0
  local last = tonumber(redis.call('ZRANGE', prefix .. ':requeued', -1, -1, 'WITHSCORES')[2] or -1)
  local repeated = answered(prefix, args[1])
  for i = 2, #args do
    local id = args[i]
    local letter = read_letter(prefix, id)
    local before = not letter and redis.call('HGET', prefix .. ':requeued:letters', id)
    local why = not before and (over or objection(prefix, letter) or repeated and 'a restore has brought it back: request it again')
    if letter and not why then
      redis.call('XDEL', prefix .. ':deadletter', id)
      redis.call('HDEL', prefix .. ':drops', letter.ticket)
      redis.call('ZREM', prefix .. ':drops:order', letter.ticket)
      put_back = put_back + 1
      redis.call('ZADD', prefix .. ':requeued', last + put_back, letter.ticket)
      remember(prefix .. ':requeued:letters', prefix .. ':requeued:letters:order', id, letter.ticket, now_ms())
    end
    for _, part in ipairs({id, letter and letter.ticket or before or '', why or '', before and 1 or 0}) do reply[#reply + 1] = part end
  end
  if not repeated then record_answer(prefix, args[1], put_back) end
  if put_back > 0 then
    count(prefix, 'failed', -put_back)
    notify(prefix, 'slots')
  end
  return reply
end)
